"""Ranks come to life here: from the rank server (this machine, milliseconds) or under torchrun.

Environment variables are read in this folder and nowhere else in the package.
"""

from minidist.tools.launch.client import RankServer, forward_signals, launch
from minidist.tools.launch.failure import RankFailure
from minidist.tools.launch.threads import threads_per_rank, usable_cores

__all__ = ["RankFailure", "RankServer", "forward_signals", "launch", "threads_per_rank", "usable_cores"]
