"""`python -m minidist.tools.parity`, the same as `minidist parity`."""

import sys

import tyro

from minidist.errors import RunError, UserError
from minidist.tools.parity.command import ParityOptions, main

if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(ParityOptions, prog="minidist parity")))
    except (UserError, RunError) as error:
        print(f"minidist: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
