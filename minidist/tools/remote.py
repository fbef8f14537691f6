"""Copies of a run's checkpoints in a remote folder: any file system that fsspec has a driver for, such as s3://.

Rank 0 uploads each complete checkpoint in the background. The index is uploaded last, so a remote checkpoint is
complete if and only if it has an index. A run without a local run folder, as on a new node, downloads the newest
complete checkpoint and resumes.
"""

import os
import queue
import re
import shutil
import threading
from pathlib import Path

from minidist.checkpoint import folders
from minidist.checkpoint.index import INDEX_NAME, find_damaged_files, read_index_file
from minidist.config import CheckpointConfig, Config
from minidist.errors import DamagedError, UserError
from minidist.tools.launch.run_folder_guard import CONFIG
from minidist.train.observer import Observer
from minidist.train.run_folder import AUTO, CHECKPOINTS
from minidist.train.trainer import Trainer

_NAME = re.compile(r"step-(\d{8,})")


class RemoteFolder:
    """The folder at `url` with copies of a run's checkpoints, on any file system that fsspec knows, such as s3://.

    Raises UserError if fsspec or its driver for the URL is missing. The methods raise the driver's exceptions if the
    remote file system fails.
    """

    def __init__(self, url: str):
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(url)
        except ImportError as error:
            raise UserError(
                f"--checkpoint.remote {url} needs a package that is not installed: {error}. In "
                "minidist's folder, run pip install -e '.[remote]'; also install the file system's driver (s3fs for "
                "s3://, gcsfs for gs://)."
            ) from None
        except ValueError as error:
            raise UserError(f"--checkpoint.remote {url} is not a URL that fsspec knows: {error}.") from None
        self.url = url

    def complete_steps(self) -> list[int]:
        """Return the steps whose remote checkpoint is complete, ascending; [] if the remote folder does not exist."""
        return [step for step in self._list_steps() if self._files.exists(self._path(step, INDEX_NAME))]

    def _list_steps(self) -> list[int]:
        """Return the steps of all remote checkpoints, complete or not, ascending."""
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return []
        names = [Path(path.rstrip("/")).name for path in self._files.ls(self._root, detail=False)]
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def upload(self, folder: Path, step: int) -> None:
        """Copy the complete local checkpoint `folder` to the remote folder as the checkpoint of `step`. Blocks.

        An earlier remote checkpoint of this step is deleted first. The index is copied last, so that a remote
        checkpoint with an index is complete.
        """
        self.delete(step)
        self._files.makedirs(self._path(step), exist_ok=True)
        for file in sorted(folder.iterdir(), key=lambda file: file.name == INDEX_NAME):
            self._files.put_file(str(file), self._path(step, file.name))

    def download(self, step: int, root: Path) -> Path:
        """Copy the remote checkpoint of `step` into `root`, a local folder of checkpoints; return its new folder.

        Also restores the run's configuration file beside `root` if it is missing. Raises DamagedError if a checksum is
        wrong; then no copy is left.
        """
        partial = folders.checkpoint_folder(root, step, ".partial")
        folders.create_partial_folder(partial)
        try:
            self._files.get_file(self._path(step, INDEX_NAME), str(partial / INDEX_NAME))
            index = read_index_file(partial)
            for name in index.files:
                self._files.get_file(self._path(step, name), str(partial / name))
                folders.fsync_path(partial / name)
            if problems := find_damaged_files(index, index.files):
                raise DamagedError(f"the checkpoint of step {step} in {self.url}: {'; '.join(problems)}")
            config = root.parent / CONFIG
            if root.name == CHECKPOINTS and not config.exists() and isinstance(index.state.get("config"), str):
                config.write_text(index.state["config"])
            return folders.commit_checkpoint(root, step)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def prune(self, keep: int, keep_every: int = 0) -> None:
        """Delete old remote checkpoints: all but the newest `keep` and those whose step is a multiple of `keep_every`.

        keep_every: 0 for no such steps. Also deletes incomplete checkpoints, which interrupted uploads have left.
        """
        complete = self.complete_steps()
        kept = {*complete[-keep:], *(step for step in complete if keep_every and step % keep_every == 0)}
        for step in self._list_steps():
            if step not in kept:
                self.delete(step)

    def delete(self, step: int) -> None:
        """Delete the remote checkpoint of a step, its index first. Does nothing if there is none."""
        for path in (self._path(step, INDEX_NAME), self._path(step)):
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def _path(self, step: int, *names: str) -> str:
        """Return the remote path of a checkpoint, or of a file in it."""
        return "/".join([self._root.rstrip("/"), folders.checkpoint_folder(Path(), step).name, *names])


def fetch_newer_checkpoint(config: Config) -> str | None:
    """Download the newest intact remote checkpoint if it is newer than the run folder's; return a note on that.

    Called by one process, before the run folder is opened. Returns None if there was nothing to download, if
    `checkpoint.remote` is not set, or if `checkpoint.resume` names a checkpoint to resume from. Raises UserError if the
    remote folder cannot be read or `config.folder` is not set.
    """
    how = config.checkpoint
    if how.remote is None or how.resume not in (None, AUTO):
        return None
    if config.folder is None:
        raise UserError(
            f"--checkpoint.remote {how.remote} without --folder: a run that is started again finds its checkpoints by "
            "both. Give --folder, too."
        )
    remote, root, notes = RemoteFolder(how.remote), Path(config.folder).expanduser() / CHECKPOINTS, []
    try:
        for step in reversed(remote.complete_steps()):
            if step <= max(folders.complete_checkpoints(root), default=-1):
                break
            try:
                notes.append(f"downloaded {remote.download(step, root)} from {how.remote}")
                break
            except DamagedError as error:
                notes.append(str(error))
    except Exception as error:
        raise UserError(
            f"--checkpoint.remote {how.remote} cannot be read: {_format_error(error)}. "
            "Give another one, or leave it out."
        ) from error
    return "; ".join(notes) or None


class CheckpointUploader(Observer):
    """Observer of a run that copies each complete checkpoint to the remote folder, in a background thread on rank 0.

    config: names the remote folder (`remote`) and how many checkpoints to keep in it: after each upload, older ones are
    deleted. A failed upload is noted and does not end the run. At most one upload is in flight and one waits; a newer
    checkpoint replaces the waiting one.
    """

    def __init__(self, config: CheckpointConfig):
        self._config, self._remote = config, RemoteFolder(config.remote)
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting: tuple[int, Path] | None = None
        self._changed, self._is_uploading, self._is_closed = threading.Condition(), False, False
        self._thread: threading.Thread | None = None

    def on_start(self, trainer: Trainer) -> None:
        """On rank 0, start the uploading thread; delete the hard links to checkpoints that an interrupted run left."""
        self._folder, self._is_first = trainer.folder, trainer.world.rank == 0
        if self._is_first:
            self._delete_links()
            self._thread = threading.Thread(target=self._run_uploads, name="checkpoint-upload", daemon=True)
            self._thread.start()

    def before_step(self, trainer: Trainer) -> None:
        """Send a note to all observers about each upload that has failed since the last call."""
        while not self._failures.empty():
            trainer.send_note(self._failures.get())

    def on_checkpoint(self, path: Path) -> None:
        """On rank 0, queue the checkpoint at `path` for upload, in place of any that still waits; return at once.

        The queue has hard links to the files, because the trainer may delete the checkpoint before it is uploaded.
        """
        if self._is_first:
            # Hard links: the trainer may delete the checkpoint before it is uploaded.
            step = folders.parse_step(path)
            links = self._folder / f"upload-{step:08d}"
            shutil.rmtree(links, ignore_errors=True)
            shutil.copytree(path, links, copy_function=_link_or_copy)
            with self._changed:
                if self._waiting is not None:
                    shutil.rmtree(self._waiting[1], ignore_errors=True)
                self._waiting = step, links
                self._changed.notify_all()

    def on_end(self, trainer: Trainer, summary: dict) -> None:
        """Wait until all queued checkpoints are uploaded or have failed; send a note about each failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._is_uploading)
        self.before_step(trainer)

    def close(self) -> None:
        """Tell the thread to end after the upload in flight, without waiting; delete links to queued checkpoints."""
        if self._thread is not None:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            self._delete_links()

    def _delete_links(self) -> None:
        """Delete the folders of hard links to checkpoints."""
        for links in self._folder.glob("upload-*"):
            shutil.rmtree(links, ignore_errors=True)

    def _run_uploads(self) -> None:
        """Upload queued checkpoints, in a thread of its own, until `close`."""
        while True:
            with self._changed:
                self._is_uploading = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
                if self._is_closed:
                    return
                (step, links), self._waiting, self._is_uploading = self._waiting, None, True
            try:
                self._remote.upload(links, step)
                self._remote.prune(self._config.keep, self._config.keep_every)
            except Exception as error:
                self._failures.put(
                    f"the checkpoint of step {step} was not copied to {self._remote.url}: {_format_error(error)}. "
                    "The run goes on, and tries again after the next save."
                )
            shutil.rmtree(links, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    """Make a hard link, or a copy on a file system without hard links."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _format_error(error: Exception) -> str:
    """Return the exception's class and message as one text."""
    return f"{type(error).__name__}: {error}".rstrip(". ")
