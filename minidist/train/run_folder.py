"""The folder of a run, in which the trainer saves checkpoints and tools write what they observe."""

import contextlib
import dataclasses
import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from minidist.config import Config
from minidist.config_file import from_toml
from minidist.errors import UserError
from minidist.fault import folders

CHECKPOINTS = "checkpoints"
CONFIG = "config.toml"
RUNS = Path("runs")
AUTO = Path("auto")  # the value of --checkpoint.resume for "the newest checkpoint, if there is one"
JOB = "job"  # the name of the launcher's job; a job that is started again finds its run by it
_LOCK = "lock"
# Options that may change when a run is resumed automatically: a resumed run gives the same losses with any of them.
_MAY_CHANGE = (
    "train.log_every",
    "train.max_skipped_steps",
    "train.straggler_threshold",
    "train.eval_every",
    "train.eval_samples",
    "train.sample_tokens",
    "train.micro_batches",
)
_MUST_STAY = ("model", "data", "optim", "precision", "train")


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, `path`, and the checkpoints to resume from, in the order to try them; none for a new run."""

    path: Path
    checkpoints: tuple[Path, ...] = ()


def open_run_folder(config: Config) -> RunFolder:
    """Choose and create the folder of this run: `config.folder`, the resumed run's, or the next free `runs/NNNN`.

    If `config.folder` holds a run of the same configuration, or if `config.checkpoint.resume` is `AUTO`, the run
    continues from the newest intact checkpoint in it. Two runs that start at once get different new folders.
    Raises UserError if the folder cannot be used or created.
    """
    folder = None if config.folder is None else Path(config.folder).expanduser()
    resume, checkpoints = config.checkpoint.resume, ()
    if resume not in (None, AUTO):
        newest = folders.latest_checkpoint(find_checkpoints_folder(resume))
        source, checkpoints = find_run_folder(newest), (newest,)
        if source is not None and (folder is None or folder.resolve() == source):
            _refuse_to_go_back(newest, source)
            folder = folder or source
        elif folder is not None and (not _is_run_folder(folder) or folders.complete_checkpoints(folder / CHECKPOINTS)):
            _check_is_empty(folder, "and a resumed run needs a folder of its own, or that of the run it resumes")
    elif folder is not None:
        if folder.is_dir() and not _is_run_folder(folder):
            _check_is_empty(folder, "and a new run needs a folder of its own")
        if resume is None:
            _check_same_run(folder, config)
        checkpoints = tuple(reversed(folders.complete_checkpoints(folder / CHECKPOINTS).values()))
    elif resume == AUTO:
        raise UserError("--checkpoint.resume auto looks for checkpoints in the run folder: name it with --folder.")
    return RunFolder(_create(folder), checkpoints)


def _create(folder: Path | None) -> Path:
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


class RunLock:
    """A lock that keeps two live runs from writing to one run folder; acquired by the constructor, on rank 0.

    A POSIX record lock (fcntl(2)): it also works between the nodes of a network file system, a child process does not
    inherit it, and it is released when the process ends. Raises UserError, which names the owner, if another process
    holds the lock.
    """

    def __init__(self, folder: Path):
        self._path = folder / _LOCK
        while True:
            self._file = self._lock()
            # The owner before may have deleted the file between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                    break
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def _lock(self) -> IO[str]:
        file = self._path.open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # either, by POSIX
            with file:
                file.seek(0)
                owner = file.read().strip() or "unknown process"
            raise UserError(
                f"the run folder {self._path.parent} is in use by another run ({owner}): wait until it ends, stop it, "
                "or give this run a folder of its own with --folder."
            ) from None
        except OSError:  # a file system without locks
            pass
        return file

    def release(self) -> None:
        """Release the lock, so that another run can use the folder."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def _is_run_folder(folder: Path) -> bool:
    return (folder / CONFIG).exists() or bool(folders.complete_checkpoints(folder / CHECKPOINTS))


def _check_is_empty(folder: Path, why: str) -> None:
    """Raise UserError if there are files in `folder` that a run would mix with its own."""
    names = sorted(set(os.listdir(folder)) - {_LOCK, JOB}) if folder.is_dir() else []
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise UserError(
            f"--folder {folder} is not empty (it holds {', '.join(names[:4])}{more}), {why}: give another one."
        )


def _check_same_run(folder: Path, config: Config) -> None:
    """Raise UserError if `folder` holds a run whose losses would differ from those of this configuration."""
    if not (folder / CONFIG).exists():
        return
    changed = describe_config_changes(from_toml(folder / CONFIG), config)
    if changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise UserError(
            f"--folder {folder} holds a run with other options ({', '.join(changed[:4])}{more}): give another folder, "
            f"or go on with that run under these options with --checkpoint.resume {folder}."
        )


def describe_config_changes(before: Config, config: Config) -> list[str]:
    """Compare the options that affect a run's losses: a line like `optim.lr 0.003 there, 0.001 here` per difference.

    before: the earlier configuration ("there"). config: this run's ("here").
    """
    return [
        f"{section}.{field.name.replace('_', '-')} {was} there, {now} here"
        for section in _MUST_STAY
        for field in dataclasses.fields(getattr(config, section))
        if f"{section}.{field.name}" not in _MAY_CHANGE
        and (was := _value(before, section, field.name)) != (now := _value(config, section, field.name))
    ]


def _value(config: Config, section: str, field: str) -> Any:
    return getattr(getattr(config, section), field)


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


def find_checkpoints_folder(path: str | Path) -> Path:
    """Return the `checkpoints` folder in run folder `path`; `path` itself if it has none."""
    inner = Path(path) / CHECKPOINTS
    return inner if inner.is_dir() else Path(path)


def find_run_folder(checkpoint: Path) -> Path | None:
    """Return the run folder that contains a checkpoint, or None if it is not in one."""
    parent = checkpoint.resolve().parent
    return parent.parent if parent.name == CHECKPOINTS else None


def describe_last_checkpoint(folder: Path) -> str:
    """Return a sentence about the last checkpoint of a failed run and how to resume from it."""
    found = folders.complete_checkpoints(folder / CHECKPOINTS)
    if not found:
        return "No checkpoint had been written yet."
    return f"The last checkpoint is {found[max(found)]}: go on with --checkpoint.resume {folder}"
