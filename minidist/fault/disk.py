"""A folder on disk as the few operations whose order decides what survives a crash."""

import os
import shutil
from pathlib import Path

from minidist.checkpoint.folders import fsync_path


class Disk:
    """The files in folder `root`, with the operations whose order decides what survives a crash.

    Names are paths relative to `root`, like `step-00000100/index.json`; "" is `root`. After a crash of the machine, a
    file that was written but not synced may be empty, or hold any part of its bytes; a rename may have happened or not,
    until the folder that contains the entry is synced. A rename never happens halfway.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, replacing it if it exists; create its folder if necessary. Raises OSError on failure."""
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def sync(self, name: str) -> None:
        """Wait until the bytes of a file, or the entries of a folder, are on disk (fsync)."""
        fsync_path(self.root / name)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or a folder. Raises OSError if `new` is a folder with entries, or `old` does not exist."""
        os.rename(self.root / old, self.root / new)

    def remove(self, name: str) -> None:
        """Delete a folder with all that it contains, one entry after the other; do nothing if it does not exist."""
        if (self.root / name).exists():
            shutil.rmtree(self.root / name)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file. Raises FileNotFoundError if it does not exist."""
        return (self.root / name).read_bytes()

    def names(self) -> list[str]:
        """Return the names of the entries of the root folder, sorted; [] if it does not exist."""
        return sorted(os.listdir(self.root)) if self.root.is_dir() else []
