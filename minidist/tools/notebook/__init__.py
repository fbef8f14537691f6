"""Live ranks in JupyterLab: `%load_ext minidist.tools.notebook`, then `%ranks 4` and `%%ranks` on top of a cell.

A cell's ranks keep their variables for the next one, `%%piece` replaces a part of the package in all of them, `predict`
asks before a measurement, and the pictures draw what was measured.
"""

from minidist.tools.notebook.charts import loss_curves, memory_bars, memory_beside, tensor_bytes
from minidist.tools.notebook.course import reach_course
from minidist.tools.notebook.curves import curves, winners
from minidist.tools.notebook.pictures import timeline, traffic
from minidist.tools.notebook.predict import NEVER, Prediction, measured, predict
from minidist.tools.notebook.result import CellResult
from minidist.tools.notebook.session import LiveRanks

__all__ = [
    "NEVER",
    "CellResult",
    "LiveRanks",
    "Prediction",
    "curves",
    "loss_curves",
    "measured",
    "memory_bars",
    "memory_beside",
    "predict",
    "tensor_bytes",
    "timeline",
    "traffic",
    "winners",
]


def load_ipython_extension(shell) -> None:
    """What `%load_ext minidist.tools.notebook` does."""
    from minidist.tools.notebook.magics import RanksMagics  # IPython is needed from here on only

    reach_course()
    shell.register_magics(RanksMagics(shell))


def unload_ipython_extension(shell) -> None:
    """What `%unload_ext minidist.tools.notebook` does: the ranks end, the pieces are the package's own again."""
    magics = shell.magics_manager.registry.pop("RanksMagics", None)
    if magics is not None:
        magics.close()
