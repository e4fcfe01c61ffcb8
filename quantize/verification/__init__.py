"""What `verify` checks, one kind of proof to a module; quantize/verify.py puts them together."""
