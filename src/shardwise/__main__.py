"""``python -m shardwise``: the command, where it is not on the path."""

import sys

from shardwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
