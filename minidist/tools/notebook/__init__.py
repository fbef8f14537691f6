"""Live ranks in JupyterLab: `%load_ext minidist.tools.notebook`, then `%ranks 4` and `%%ranks` on top of a cell.

Ranks keep their variables between cells, `%%piece` replaces a function or class of the package on all of them,
`predict` asks for an estimate before a measurement, and the plots draw measured data.

Reading order: `magics` (the commands), `session` (live ranks, seen from the kernel), `request_watcher` and
`blocked_in_torch` (wait for a cell, detect that it hangs), `result` (what a cell returns), `rank_session` (the rank's
side); `predict`; `diagrams` (of ideas), `node_diagram` (of groups on nodes), `pictures`, `charts`, `curves` and
`phases` (of what was measured); `frontend` and `course_path` (the notebook's surroundings); `weave` (keeps notebooks
equal to the package); `pipeline_stand_in` (a pipeline of chapter 02b that counts time), `small_models` (the models of
chapters 05 and 06) and `small_runs` (the runs of chapter 07).
"""

from minidist.tools.notebook.charts import (
    compare_memory,
    memory_by_category,
    plot_loss_differences,
    plot_losses,
    plot_memory,
)
from minidist.tools.notebook.course_path import add_course_to_path
from minidist.tools.notebook.curves import compare_curves, plot_winners
from minidist.tools.notebook.diagrams import Cell, Transfer, contributions, plot_cells, plot_transfers
from minidist.tools.notebook.node_diagram import bytes_across_nodes, plot_groups_on_nodes
from minidist.tools.notebook.phases import plot_outcomes, plot_phases, plot_resharding
from minidist.tools.notebook.pictures import plot_timeline, plot_traffic
from minidist.tools.notebook.predict import NEVER, Prediction, predict, score_prediction
from minidist.tools.notebook.result import CellResult
from minidist.tools.notebook.session import LiveRanks

__all__ = [
    "NEVER",
    "Cell",
    "CellResult",
    "LiveRanks",
    "Prediction",
    "Transfer",
    "bytes_across_nodes",
    "compare_curves",
    "compare_memory",
    "contributions",
    "memory_by_category",
    "plot_cells",
    "plot_groups_on_nodes",
    "plot_loss_differences",
    "plot_losses",
    "plot_memory",
    "plot_outcomes",
    "plot_phases",
    "plot_resharding",
    "plot_timeline",
    "plot_traffic",
    "plot_transfers",
    "plot_winners",
    "predict",
    "score_prediction",
]


def load_ipython_extension(shell) -> None:
    """Register the magics `%ranks` and `%%piece`. IPython calls this for `%load_ext minidist.tools.notebook`."""
    from minidist.tools.notebook.magics import RanksMagics  # IPython is needed from here on only

    add_course_to_path()
    shell.register_magics(RanksMagics(shell))


def unload_ipython_extension(shell) -> None:
    """End the notebook's ranks and restore replaced symbols. IPython calls this for `%unload_ext`."""
    magics = shell.magics_manager.registry.pop("RanksMagics", None)
    if magics is not None:
        magics.close()
