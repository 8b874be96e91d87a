"""Lets ``python -m shardctl`` do what the installed command does."""

from shardctl.cli import main

if __name__ == "__main__":
    main()
