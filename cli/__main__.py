"""`python -m kizami.cli` is `kizami`."""

from kizami.cli.app import main

if __name__ == "__main__":
    main()
