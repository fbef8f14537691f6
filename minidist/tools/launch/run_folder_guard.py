"""The run folder of `minidist train`: refuse one that belongs to another run, and keep other live runs out of it."""

import contextlib
import dataclasses
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from minidist.checkpoint import folders
from minidist.config import Config
from minidist.errors import UserError
from minidist.tools.config_file import read_config_file
from minidist.train.observer import Observer
from minidist.train.resume import find_changed_options
from minidist.train.run_folder import (
    AUTO,
    CHECKPOINTS,
    RunFolder,
    find_checkpoints_folder,
    find_run_folder,
    open_run_folder,
)

CONFIG = "config.toml"
JOB = "job"  # the name of the launcher's job; a job that is started again finds its run by it
_LOCK = "lock"


class RunFolderGuard(Observer):
    """Observer of a run that refuses a run folder with another run's files, and locks the folder until the run ends."""

    def __init__(self, config: Config):
        self._config = config
        self._lock: RunLock | None = None

    def check_folder(self, folder: Path) -> None:
        """Lock `folder`. Raises UserError if it belongs to another run or a live run uses it. Called on rank 0."""
        _check_run_folder(dataclasses.replace(self._config, folder=folder))
        self._lock = RunLock(folder)

    def close(self) -> None:
        """Release the lock on the run folder."""
        if self._lock is not None:
            self._lock.release()


def open_checked_run_folder(config: Config) -> RunFolder:
    """Choose and create the folder for a run of `config`; return it.

    Raises UserError if the run would mix its files with those of another run.
    """
    _check_run_folder(config)
    return open_run_folder(config)


def _check_run_folder(config: Config) -> None:
    """Raise UserError if a run of `config` would mix its files with those of another run in `config.folder`.

    If the folder has a run of the same configuration, this run may continue it. If it has a run of another
    configuration, this run may do so only if `config.checkpoint.resume` asks for it.
    """
    folder = None if config.folder is None else Path(config.folder).expanduser()
    resume = config.checkpoint.resume
    if resume not in (None, AUTO):
        newest = folders.latest_checkpoint(find_checkpoints_folder(resume))
        source = find_run_folder(newest)
        if source is not None and (folder is None or folder.resolve() == source):
            _check_no_later_checkpoints(newest, source)
        elif folder is not None and (not _is_run_folder(folder) or folders.complete_checkpoints(folder / CHECKPOINTS)):
            _check_is_empty(folder, "and a resumed run needs a folder of its own, or that of the run it resumes")
    elif folder is not None:
        if folder.is_dir() and not _is_run_folder(folder):
            _check_is_empty(folder, "and a new run needs a folder of its own")
        if resume is None:
            _check_same_run(folder, config)


class RunLock:
    """A lock on a run folder, which keeps other live runs from writing to it. The constructor acquires the lock.

    A POSIX record lock (fcntl(2)): it also works between the nodes of a network file system, a child process does not
    inherit it, and it is released when the process ends. Raises UserError, which names the owner, if another process
    holds the lock, or if the folder cannot be written: its file system is read-only, full or gone.
    """

    def __init__(self, folder: Path):
        self._path = folder / _LOCK
        try:
            self._file = self._open_and_lock()
            try:
                os.truncate(self._file.fileno(), 0)
                os.write(self._file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            except OSError:
                self.release()
                raise
        except OSError as error:
            raise UserError(
                f"the run folder {folder} cannot be written: {error.strerror}. Give --folder a place where you may "
                "write, with free space."
            ) from None

    def _open_and_lock(self) -> IO[str]:
        """Lock the lock file; repeat if the owner before deleted the file meanwhile. Return the open file."""
        while True:
            file = self._try_lock()
            # The owner before may have deleted the file between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    return file

    def _try_lock(self) -> IO[str]:
        """Open and lock the lock file; return it. Raises UserError if another process holds the lock."""
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
    """Return whether `folder` has a run's configuration or a complete checkpoint."""
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
    options = find_changed_options(read_config_file(folder / CONFIG), config)
    changed = [f"{option.name} {option.before} there, {option.now} here" for option in options]
    if changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise UserError(
            f"--folder {folder} holds a run with other options ({', '.join(changed[:4])}{more}): give another folder, "
            f"or go on with that run under these options with --checkpoint.resume {folder}."
        )


def _check_no_later_checkpoints(at: Path, source: Path) -> None:
    """Raise UserError if the run folder has checkpoints later than `at`: two histories would mix in it."""
    found = folders.complete_checkpoints(at.parent)
    step = next((step for step, path in found.items() if path.resolve() == at.resolve()), None)
    later = [] if step is None else [other for other in found if other > step]
    if later:
        raise UserError(
            f"{at} is at step {step}, and its run has gone on to step {max(later)}: resume the latest with "
            f"--checkpoint.resume {source}, or give the new run a folder of its own with --folder."
        )
