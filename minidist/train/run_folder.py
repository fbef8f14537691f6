"""The run folder: config.toml, metrics.jsonl, loss.png and checkpoints/. Only rank 0 writes, except checkpoints."""

import contextlib
import json
import os
from pathlib import Path

from minidist.config import Config
from minidist.config_file import to_toml
from minidist.errors import RunError, UserError
from minidist.fault import folders

CHECKPOINTS = "checkpoints"
RUNS = Path("runs")


def claim(config: Config) -> Path:
    """Choose and create the folder of this run: `config.folder`, the resumed run's, or the next free `runs/0001`.

    No other run gets the same new folder. Raises UserError if the folder cannot be used or created.
    """
    folder = _asked_for(config)
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


def abandon(folder: Path) -> None:
    """Remove the run folder if it is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _asked_for(config: Config) -> Path | None:
    """Return the folder that the options name; None for a new one. Raises UserError if it cannot be used."""
    folder = None if config.folder is None else Path(config.folder).expanduser()
    resume, source = config.checkpoint.resume, None
    if resume is not None:
        at = folders.latest_checkpoint(checkpoints_of(resume))
        source = run_of(at)
        if source is not None and (folder is None or folder.resolve() == source):
            _refuse_to_go_back(at, source)
            return folder or source
    if folder is None:
        return None
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--folder {folder} is a file; give a folder that does not exist yet.")
    if folder.is_dir() and (held := sorted(path.name for path in folder.iterdir())):
        ours = folders.complete_checkpoints(folder / CHECKPOINTS)
        instead = f", or go on with this one by --checkpoint.resume {folder}" if ours and resume is None else ""
        more = f" and {len(held) - 4} more" if len(held) > 4 else ""
        raise UserError(
            f"--folder {folder} is not empty (it holds {', '.join(held[:4])}{more}), and a new run needs a folder of "
            f"its own: give another one{instead}."
        )
    return folder


def _refuse_to_go_back(at: Path, source: Path) -> None:
    """Raise UserError if the run folder has checkpoints later than `at`: two histories would mix in it."""
    found = folders.complete_checkpoints(at.parent)
    step = next((step for step, path in found.items() if path.resolve() == at.resolve()), None)
    later = [] if step is None else [other for other in found if other > step]
    if later:
        raise UserError(
            f"{at} is at step {step}, and its run has gone on to step {max(later)}: resume the latest with "
            f"--checkpoint.resume {source}, or give the new run a folder of its own with --folder."
        )


def checkpoints_of(path: str | Path) -> Path:
    """Return the folder of checkpoints of a run folder; any other path is returned as it is."""
    inner = Path(path) / CHECKPOINTS
    return inner if inner.is_dir() else Path(path)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder that contains a checkpoint, or None if it is not in one."""
    parent = checkpoint.resolve().parent
    return parent.parent if parent.name == CHECKPOINTS else None


def last_checkpoint(folder: Path) -> str:
    """Return a sentence about the last checkpoint of a failed run and how to resume from it."""
    found = folders.complete_checkpoints(folder / CHECKPOINTS)
    if not found:
        return "No checkpoint had been written yet."
    return f"The last checkpoint is {found[max(found)]}: go on with --checkpoint.resume {folder}"


class MetricsFile:
    """Writer of metrics.jsonl: one JSON object per line, appended and flushed.

    {"start": 0, "corpus": fingerprint, ...} when a run starts or resumes, {"step": 10, "loss": ...} per log step,
    {"step": 100, "held_out_loss": ...} per evaluation. A run that resumes at step `start` keeps the lines up to that
    step, from this folder or the folder `source`, and drops later ones. Raises RunError if the folder is not writable.
    """

    def __init__(self, folder: Path, config: Config, start: int, source: Path | None = None):
        self.path = folder / "metrics.jsonl"
        before = read_metrics((source or folder) / self.path.name) if start else []
        self.rows = [row for row in before if row.get("step", start) <= start and row.get("start", -1) < start]
        with writing(folder):
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
            write_atomically(folder / "config.toml", to_toml(config))

    def write(self, row: dict) -> None:
        """Append one line. Raises RunError if the file cannot be written."""
        self.rows.append(row)
        with writing(self.path.parent), self.path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def read_metrics(path: Path) -> list[dict]:
    """Read the rows of a metrics file, without a last line that a crash has truncated."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


@contextlib.contextmanager
def writing(folder: Path):
    """Turn an OSError in this context into a RunError about the run folder."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be written: {error.strerror or error}. {last_checkpoint(folder)}"
        ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, then rename it, so that readers never see a partial file. Raises OSError."""
    try:
        partial_path(path).write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial_path(path), path)
    except OSError:
        with contextlib.suppress(OSError):
            partial_path(path).unlink()
        raise


def partial_path(path: Path) -> Path:
    """Return the temporary name under which `write_atomically` writes a file."""
    return path.with_name(path.name + ".partial")
