"""`python -m exercises lab`: JupyterLab on the learner's folder, with this Python in its notebooks and terminals."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from exercises.catalogue import ROOT
from exercises.work import Work
from minidist.errors import UserError

_SETTINGS = Path(__file__).parent / "jupyter"


def jupyterlab_command(work: Work, options: Sequence[str] = ()) -> list[str]:
    """Return the command that starts JupyterLab with the first chapter open. options: of JupyterLab itself."""
    own = ["--ServerApp.root_dir", str(work.folder.resolve())]
    if chapters := sorted(work.folder.glob("chapters/*/*.ipynb")):
        own += ["--LabApp.default_url", f"/lab/tree/{chapters[0].relative_to(work.folder).as_posix()}"]
    return [sys.executable, "-m", "jupyterlab", *own, *options]


def jupyterlab_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of JupyterLab.

    In its terminals, `python` is this one and finds `exercises` from every folder. By default,
    notebooks are saved often and nothing is fetched from the network.
    """
    path = {
        "PATH": [str(Path(sys.executable).parent), environ.get("PATH")],
        "PYTHONPATH": [str(ROOT), environ.get("PYTHONPATH")],
        "JUPYTER_CONFIG_PATH": [str(_SETTINGS), environ.get("JUPYTER_CONFIG_PATH")],
    }
    return {**environ, **{name: os.pathsep.join(filter(None, parts)) for name, parts in path.items()}}


def start_jupyterlab(work: Work, options: Sequence[str] = ()) -> None:
    """Replace this process by JupyterLab. Raises UserError if it is not installed."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise UserError(
            "JupyterLab is not installed here; make lab installs it, and so does pip install -e '.[course]'"
        )
    arguments = jupyterlab_command(work, options)
    os.execve(arguments[0], arguments, jupyterlab_environment(os.environ))
