"""The folder of a run, in which the trainer saves checkpoints and tools write what they observe."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from minidist.checkpoint import folders
from minidist.config import Config
from minidist.errors import UserError

CHECKPOINTS = "checkpoints"
RUNS = Path("runs")
AUTO = Path("auto")  # the value of --checkpoint.resume for "the newest checkpoint, if there is one"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    path: the folder. checkpoints: those to resume from, in the order to try them; none for a new run. unfinished: the
    checkpoints in the same place whose save or deletion was interrupted.
    """

    path: Path
    checkpoints: tuple[Path, ...] = ()
    unfinished: tuple[Path, ...] = ()

    def describe_unfinished_saves(self) -> list[str]:
        """Return a line for the log about the unfinished checkpoints; [] if there are none."""
        if not self.unfinished:
            return []
        names = ", ".join(path.name for path in self.unfinished)
        return [
            f"unfinished in {self.unfinished[0].parent}, because a run ended while it saved or deleted a checkpoint: "
            f"{names}. It is not used, and the next save deletes it."
        ]


def open_run_folder(config: Config) -> RunFolder:
    """Choose and create the folder of this run: `config.folder`, the resumed run's, or the next free `runs/NNNN`.

    Two runs that start at once get different new folders. Unless `config.checkpoint.resume` names a checkpoint, the run
    continues from the newest intact one in `config.folder`. Raises UserError if the folder cannot be created.
    """
    folder = None if config.folder is None else Path(config.folder).expanduser()
    if (resume := config.checkpoint.resume) not in (None, AUTO):
        newest = folders.latest_checkpoint(find_checkpoints_folder(resume))
        path = _create_run_folder(folder or find_run_folder(newest))
        return RunFolder(path, (newest,), tuple(folders.unfinished_checkpoints(newest.parent)))
    if folder is None and resume == AUTO:
        raise UserError("--checkpoint.resume auto looks for checkpoints in the run folder: name it with --folder.")
    found = {} if folder is None else folders.complete_checkpoints(folder / CHECKPOINTS)
    unfinished = () if folder is None else folders.unfinished_checkpoints(folder / CHECKPOINTS)
    return RunFolder(_create_run_folder(folder), tuple(reversed(found.values())), tuple(unfinished))


def _create_run_folder(folder: Path | None) -> Path:
    """Create `folder`, or the next free folder in RUNS for None. Raises UserError if the system refuses."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise UserError(f"--folder {folder} is a file; give a folder that does not exist yet.")
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        RUNS.mkdir(exist_ok=True)
        while True:
            taken = [int(path.name) for path in RUNS.iterdir() if path.name.isdigit()]
            folder = RUNS / f"{max(taken, default=0) + 1:04d}"
            with contextlib.suppress(FileExistsError):  # another run has just created it
                folder.mkdir()
                return folder
    except OSError as error:
        raise UserError(
            f"the run folder {folder or RUNS.resolve()} cannot be made: {error.strerror}. "
            "Give --folder a place where you may write."
        ) from None


def find_checkpoints_folder(path: str | Path) -> Path:
    """Return the subfolder `checkpoints` of run folder `path`; `path` itself if it has none."""
    inner = Path(path) / CHECKPOINTS
    return inner if inner.is_dir() else Path(path)


def find_run_folder(checkpoint: Path) -> Path | None:
    """Return the run folder that contains a checkpoint, or None if no run folder does."""
    parent = checkpoint.resolve().parent
    return parent.parent if parent.name == CHECKPOINTS else None


def describe_last_checkpoint(folder: Path) -> str:
    """Return a sentence about the last checkpoint of a failed run and how to resume from it."""
    found = folders.complete_checkpoints(folder / CHECKPOINTS)
    if not found:
        return "No checkpoint had been written yet."
    return f"The last checkpoint is {found[max(found)]}: go on with --checkpoint.resume {folder}"
