"""Save checkpoints: boxes (index ranges) of named global tensors, which any layout can load.

describe -> copy -> write -> commit: each rank copies its boxes to host memory and writes them to its own file in a
temporary folder, in a thread; rank 0 adds the index and renames the folder. Until then the previous checkpoint stays
the latest. Each phase ends in an exchange of its outcome (`run_on_all_ranks`), after which all ranks continue or all of
them raise. `all_gather_object` is an argument, so that this module does not import `comm`.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from minidist.checkpoint import folders, shards
from minidist.checkpoint.index import INDEX_NAME, FileEntry, format_index, format_tensors
from minidist.checkpoint.shards import TensorShard
from minidist.checkpoint.tensor_file import write_tensor_file
from minidist.errors import RunError
from minidist.fault.collective_errors import ErrorOnAnyRank, GatherObjects, gather_single_rank, run_on_all_ranks


@dataclass
class _PendingSave:
    """A save in flight.

    file: the future of this rank's file; its result is the file's entry. is_committed: on rank 0, whether the
    checkpoint is complete already; on other ranks False.
    """

    step: int
    state: dict
    file: "Future[FileEntry | None]"
    is_committed: bool = False


class CheckpointSaver:
    """Saves checkpoints into one folder while training goes on (asynchronous checkpointing).

    `start_save` copies this rank's shards to host memory and starts a thread that writes them to this rank's file;
    `finish_save` turns the files of all ranks into a complete checkpoint. Only these two methods are collective. At
    most one save is in flight. A trainer calls `finish_save` once `is_local_write_finished` is True on every rank, so
    that no rank waits for the disk of another. Ranks that do not meet in every step set `writes_entries`; then rank 0
    can complete the checkpoint without them (`commit_if_written`), and they learn it in the next `finish_save`.

    root: the folder, shared by all ranks, in which each checkpoint gets a subfolder. all_gather_object: takes this
    rank's value and returns the values of all ranks of the group, in order. rank: this rank's index in the group.
    Attributes to set: gather_object, by default all_gather_object, may return the values on rank 0 only; on_phase is
    called with (phase, step) when this rank begins a phase: "copy", "write" (in the writing thread) or "rename".
    writes_entries, the same on all ranks: whether each rank writes the `FileEntry` of its file beside it, once the file
    is on disk.
    """

    def __init__(self, root: str | Path, all_gather_object: GatherObjects = gather_single_rank, rank: int = 0):
        self.root = Path(root)
        self.all_gather_object = all_gather_object
        self._rank = rank
        self.gather_object = all_gather_object
        self._plan: shards.Plan | None = None  # of the last save: rank 0 knows it
        self._tensors: dict = {}  # rank 0: the tensors in the index of the last save
        self._num_ranks = 0  # of the last save
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copies: dict[str, Tensor] = {}  # reused: fresh memory would cost another pass over it
        self._save: _PendingSave | None = None
        self.on_phase: Callable[[str, int], None] = lambda phase, step: None
        self.writes_entries = False

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight: started, and not yet completed by `finish_save`."""
        return self._save is not None

    @property
    def is_local_write_finished(self) -> bool:
        """Whether this rank has finished writing its file, successfully or not. True if no save is in flight.

        `finish_save` raises the error if the file could not be written.
        """
        return self._save is None or self._save.file.done()

    @property
    def host_copy_bytes(self) -> int:
        """Bytes of host memory that hold copies of tensors; kept allocated between saves. 0 before the first save."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies.values())

    def start_save(self, step: int, local_shards: Iterable[TensorShard], state: dict, *, copy: bool = True) -> None:
        """Collective: start to save the checkpoint of `step`. The tensors may change as soon as the call returns.

        local_shards: the shards of this rank; over all ranks, the shards with `is_saved_here` must cover every element
        exactly once. state: a JSON object (configuration, position, fingerprint of the corpus), saved by rank 0. copy:
        if False, the thread writes the tensors without copying them first, which needs no extra memory; the tensors
        must then not change until `finish_save` returns.
        Raises RuntimeError if a save is in flight; RunError, the same on all ranks, if any rank failed.
        """
        if self._save is not None:
            raise RuntimeError(f"the checkpoint of step {self._save.step} is still in flight: call finish_save() first")
        local_shards = list(local_shards)
        folder = folders.checkpoint_folder(self.root, step, ".partial")
        plan: shards.Plan

        def describe():
            nonlocal plan
            plan = shards.plan_local_shards(local_shards)
            if self._rank == 0:
                folders.create_partial_folder(folder)
            return step, plan != self._plan

        def merge():
            if self._rank == 0:
                self._tensors = format_tensors(
                    shards.merge_plans(plans, [_rank_file_name(at) for at in range(len(plans))])
                )

        try:
            outcomes = run_on_all_ranks(self.all_gather_object, describe)
            self._num_ranks = len(outcomes)
            if len(steps := sorted({at for at, _ in outcomes})) > 1:
                raise ErrorOnAnyRank(f"the ranks are not at the same step: {steps}.")
            if any(changed for _, changed in outcomes):
                self._plan = None  # until all ranks know that rank 0 has merged the plans
                plans = self.gather_object(plan)
                run_on_all_ranks(self.all_gather_object, merge)
                self._plan = plan
        except ErrorOnAnyRank as failure:
            raise self._make_error(step, failure) from failure.__cause__
        to_save = {shards.shard_key(shard): shard.tensor.detach() for shard in shards.shards_to_save(local_shards)}
        self._save = _PendingSave(step, state, self._start_writing(step, to_save, copy))

    def finish_save(self) -> Path | None:
        """Collective: wait until all ranks have written their files, complete the checkpoint, and return its folder.

        Returns None if no save is in flight. Raises RunError, the same on all ranks, if any rank failed; then
        earlier checkpoints are not changed.
        """
        if (save := self._save) is None:
            return None
        self._save = None
        entry: FileEntry | None = None

        def wait():
            nonlocal entry
            entry = save.file.result()

        def commit():
            if self._rank == 0 and not save.is_committed:
                self._commit(save, entries)

        try:
            run_on_all_ranks(self.all_gather_object, wait)
            entries = self.gather_object(entry)
            run_on_all_ranks(self.all_gather_object, commit)
        except ErrorOnAnyRank as failure:
            raise self._make_error(save.step, failure) from failure.__cause__
        return folders.checkpoint_folder(self.root, save.step)

    def commit_if_written(self) -> Path | None:
        """On rank 0, complete the checkpoint in flight if all ranks have written their files; return its folder.

        Not collective, and does not wait. Returns None on other ranks, without `writes_entries`, or if there is nothing
        to complete. `finish_save` is still due: it reports an error, in particular one of writing the index, which
        this method leaves to it.
        """
        save = self._save
        if self._rank > 0 or save is None or save.is_committed or not self.writes_entries:
            return None
        folder = folders.checkpoint_folder(self.root, save.step, ".partial")
        with contextlib.suppress(OSError):
            names = set(os.listdir(folder))  # one look at the folder, however many ranks there are
            if all(_entry_file_name(at) in names for at in range(self._num_ranks)):
                self._commit(save, [_read_entry(folder / _entry_file_name(at)) for at in range(self._num_ranks)])
                return folders.checkpoint_folder(self.root, save.step)
        return None

    def _commit(self, save: _PendingSave, entries: list[FileEntry | None]) -> None:
        """On rank 0, complete a checkpoint whose files are all on disk. entries: of the files, by rank."""
        folder = folders.checkpoint_folder(self.root, save.step, ".partial")
        files = {_rank_file_name(at): entry for at, entry in enumerate(entries) if entry}
        for name, entry in files.items():
            if not (file := folder / name).exists() or file.stat().st_size != entry.num_bytes:
                raise OSError(f"{file}, which another rank wrote, is not here: the folder is not shared by all ranks")
        self.on_phase("rename", save.step)
        (folder / INDEX_NAME).write_text(format_index(save.step, save.state, files, self._tensors))
        folders.fsync_path(folder / INDEX_NAME)
        for at in range(len(entries) if self.writes_entries else 0):
            (folder / _entry_file_name(at)).unlink(missing_ok=True)
        folders.commit_checkpoint(self.root, save.step)
        save.is_committed = True

    def close(self) -> None:
        """Wait until this rank's writing thread has finished, and end it. A save in flight is never completed."""
        self._writer.shutdown()

    def _start_writing(self, step: int, tensors: dict[str, Tensor], copy: bool) -> "Future[FileEntry | None]":
        """Copy this rank's tensors, if asked, and let the thread write them. An error is the future's outcome."""
        file = folders.checkpoint_folder(self.root, step, ".partial") / _rank_file_name(self._rank)
        try:
            self.on_phase("copy", step)
            tensors, ready = self._copy_to_host(tensors) if copy else (tensors, None)
        except Exception as error:
            (failed := Future()).set_exception(error)
            return failed
        entry_file = file.with_name(_entry_file_name(self._rank)) if self.writes_entries else None
        return self._writer.submit(
            _write_rank_file, file, tensors, ready, lambda: self.on_phase("write", step), entry_file
        )

    def _copy_to_host(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Copy tensors into host memory; the event, on CUDA, says when the copies are complete.

        The copies are ordered before later work on the same stream, so no later update is captured.
        """
        on_cuda = any(tensor.is_cuda for tensor in tensors.values())
        for key, tensor in tensors.items():
            if key not in self._copies:
                self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[key].copy_(tensor, non_blocking=True)
        ready = torch.cuda.Event() if on_cuda else None
        if ready is not None:
            ready.record()
        return {key: self._copies[key] for key in tensors}, ready

    def _make_error(self, step: int, failure: ErrorOnAnyRank) -> RunError:
        """Remove the files of a failed save and return the error that reports it."""
        if self._rank == 0:
            shutil.rmtree(folders.checkpoint_folder(self.root, step, ".partial"), ignore_errors=True)
        complete = folders.complete_checkpoints(self.root)
        last = f"the last complete one is {complete[max(complete)]}" if complete else "there is no earlier one"
        return RunError(
            f"the checkpoint of step {step} was not written to {self.root}: {failure} Nothing else changed; {last}."
        )


def save_checkpoint(
    root: str | Path,
    step: int,
    local_shards: Iterable[TensorShard],
    state: dict,
    all_gather_object: GatherObjects = gather_single_rank,
    rank: int = 0,
) -> Path:
    """Collective: save the checkpoint of `step` below the folder `root`, wait until it is complete, return its folder.

    The arguments are those of `CheckpointSaver` and `CheckpointSaver.start_save`. Raises RunError, the same on all
    ranks, if any rank failed; then earlier checkpoints are not changed.
    """
    saver = CheckpointSaver(root, all_gather_object, rank)
    try:
        saver.start_save(step, local_shards, state, copy=False)
        return saver.finish_save()
    finally:
        saver.close()


def _rank_file_name(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def _entry_file_name(rank: int) -> str:
    """Return the name of the file with the `FileEntry` of a rank's file, written beside it."""
    return f"rank-{rank:05d}.written.json"


def _write_rank_file(
    file: Path,
    tensors: dict[str, Tensor],
    ready: torch.cuda.Event | None,
    on_write: Callable[[], None],
    entry_file: Path | None,
) -> FileEntry | None:
    """Write this rank's tensors to `file` and wait until they are on disk; return the entry, None without tensors.

    ready: the event after which CUDA's copies are complete. on_write: called first. entry_file: if given, the entry is
    also written there.
    """
    try:
        on_write()
        if not tensors and entry_file is None:
            return None
        if not file.parent.is_dir():
            raise OSError(f"{file.parent}, which rank 0 made, is not here: the folder is not shared by all ranks")
        if ready is not None:
            ready.synchronize()
        entry = None
        if tensors:
            entry = write_tensor_file(file, {key: tensor.cpu().contiguous() for key, tensor in tensors.items()})
        if entry_file is not None:
            _write_entry(entry_file, entry)
        return entry
    except Exception as error:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        free = shutil.disk_usage(file.parent).free
        raise OSError(f"{error} (writing {size:,} bytes to {file}, where {free:,} are free)") from error


def _write_entry(file: Path, entry: FileEntry | None) -> None:
    """Write an entry under a temporary name and rename it, so that a reader sees all of it or no file.

    Not fsynced: it is of no use after a crash.
    """
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(entry and asdict(entry)))
    os.rename(unfinished, file)


def _read_entry(file: Path) -> FileEntry | None:
    """Return the entry that `_write_entry` wrote."""
    entry = json.loads(file.read_text())
    return entry and FileEntry(**entry)
