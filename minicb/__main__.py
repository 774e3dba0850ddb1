"""python -m minicb: see frontend/cli.py."""

import sys

from minicb.frontend.cli import main

if __name__ == "__main__":
    sys.exit(main())
