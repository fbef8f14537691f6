"""`python -m minidist.tools.parity`, the same as `minidist parity`."""

import sys

from minidist.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["parity", *sys.argv[1:]]))
