"""Words, colours and exit codes; one short function per command."""
