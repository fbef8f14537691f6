"""Where the course is, seen from a notebook, which runs in its own folder (`work/chapters/01_data_distribution`)."""

import sys
from pathlib import Path

_OWN = Path(__file__).resolve().parents[3]


def course_root(start: Path | None = None) -> Path:
    """The nearest folder above that holds the package `exercises`, else the one that this package lies in.

    start: where to begin; the folder this process runs in when None.
    """
    start = (start or Path.cwd()).resolve()
    above = (folder for folder in (start, *start.parents) if (folder / "exercises" / "__init__.py").is_file())
    return next(above, _OWN)


def reach_course(start: Path | None = None) -> None:
    """Let this process, and the ranks it starts, import what lies in the root of the course (`%load_ext exercises`)."""
    root = str(course_root(start))
    if root not in sys.path:
        sys.path.append(root)
