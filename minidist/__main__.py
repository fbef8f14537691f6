"""`python -m minidist` is the command `minidist`, and what torchrun starts."""

import sys

from minidist.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
