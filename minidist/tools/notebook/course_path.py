"""The root folder of the course, found from a notebook's folder (`work/chapters/01_data_distribution`)."""

import sys
from pathlib import Path

_OWN = Path(__file__).resolve().parents[3]


def find_course_root(start: Path | None = None) -> Path:
    """Return the nearest parent folder that contains the package `exercises`, else this package's root folder.

    start: the folder from which the search goes upwards; the current folder if None.
    """
    start = (start or Path.cwd()).resolve()
    above = (folder for folder in (start, *start.parents) if (folder / "exercises" / "__init__.py").is_file())
    return next(above, _OWN)


def add_course_to_path(start: Path | None = None) -> None:
    """Append the course's root folder to `sys.path`, so that this process can import `exercises`.

    So can ranks that this process starts. start: the folder from which the search for the root goes upwards; the
    current folder if None.
    """
    root = str(find_course_root(start))
    if root not in sys.path:
        sys.path.append(root)
