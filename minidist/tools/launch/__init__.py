"""Starting ranks: from the rank server (this machine, within milliseconds) or under torchrun.

Environment variables are read in this folder and nowhere else in the package.

Reading order: `client` (the public interface) and `job`; `server` and `rank`, which run in their processes; `protocol`
and `function_reference`, what they exchange; `rank_handle`, `failure` and `failure_report`, what the client learns of a
rank; `live_job` and `rank_worker`, ranks that stay alive for notebooks; `elastic`, processes that may die without
ending the others; `start`, `torchrun`, `device` and `environment`, how `minidist train` runs on this machine or under
torchrun; `resume`, checks before a run is resumed; `run_folder_guard`, one run per folder; `threads`, `memory_limit`
and `parent_death`, limits of a rank; `startup_time`, a measurement.
"""

from minidist.tools.launch.client import RankServer, forward_signals, launch
from minidist.tools.launch.failure import RankFailure
from minidist.tools.launch.threads import threads_per_rank, usable_cores

__all__ = ["RankFailure", "RankServer", "forward_signals", "launch", "threads_per_rank", "usable_cores"]
