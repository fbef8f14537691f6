"""`python -m minidist` is the command `minidist`, and what torchrun starts."""

from minidist.tools.cli import main
from minidist.tools.launch.torchrun import end_rank

if __name__ == "__main__":
    end_rank(main())
