"""Checkpoints: boxes (index ranges) of named global tensors, whole or absent after a crash, which any layout can load.

The format is that of the fast trainer, `minidist.checkpoint.index`: each engine loads what the other has saved.

    step-00000100/
        rank-00000.safetensors    the boxes that rank 0 saves, by keys like `params/model.norm.weight[0:24]`
        checkpoint.json           which box of which tensor is in which file, the state, and all checksums

A folder with this name is complete. Until then it is called `step-00000100.partial`.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from minidist.comm import Group, all_gather_object
from minidist.errors import DamagedError, RunError, UserError
from minidist.parameters import Box, flat_boxes

FORMAT = 2
INDEX = "checkpoint.json"
BLOCK_BYTES = 2**23
CHECKSUM = "sha256 of sha256 per 8 MiB"


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's values of one box of a global tensor.

    name: such as `params/model.norm.weight` or `optimizer.exp_avg/model.norm.weight`. shape: of the global tensor.
    tensor: the values, in the shape of the box; loading overwrites them. is_saved_here: whether this rank saves them,
    as one of the ranks that have them.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    is_saved_here: bool

    @property
    def dtype(self) -> str:
        """The dtype's name in the index: "float32"."""
        return str(self.tensor.dtype).removeprefix("torch.")


def box_key(name: str, box: Box) -> str:
    """Return the key of a box in a file: `params/model.norm.weight[0:24]`."""
    return name + "[" + ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"


def checksum(data: bytes) -> str:
    """Return the SHA-256 of the SHA-256 digests of all blocks of 8 MiB, in hexadecimal digits."""
    view = memoryview(data)
    blocks = (view[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES))
    return hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).hexdigest()


def on_all_ranks(action: Callable[[], Any], group: Group) -> list[Any]:
    """Collective: run `action` on every rank; return all results, or raise on all ranks if it failed on one.

    A rank that raised by itself would leave the others waiting for it. Raises the action's UserError, DamagedError or
    RunError, and a RunError for any other exception.
    """
    try:
        outcome = action()
    except Exception as error:
        kind = type(error) if isinstance(error, UserError | RunError) else RunError
        name = "" if isinstance(error, UserError | RunError | OSError | ValueError) else f"{type(error).__name__}: "
        outcome = kind(f"rank {group.rank}: {name}{error}")
    outcomes = all_gather_object(outcome, group)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def save(root: Path, step: int, shards: Sequence[Shard], state: dict, group: Group) -> Path:
    """Collective: save the checkpoint of `step` in the folder `root`, which all ranks share; return its folder.

    shards: this rank's; over all ranks, those with `is_saved_here` have every element once. state: a JSON object of
    rank 0. The order matters: files, then the index, then the rename, each on disk before the next, so a crash at any
    moment leaves this checkpoint whole or unfinished, and every earlier one as it was. Raises RunError on all ranks.
    """
    folder = root / f"step-{step:08d}"
    partial, replaced = (folder.with_name(f"{folder.name}.{suffix}") for suffix in ("partial", "replaced"))
    saved = [shard for shard in shards if shard.is_saved_here and shard.box.numel]

    def prepare() -> None:
        if group.rank == 0:
            remove_folder(partial)  # what an earlier attempt has left
            partial.mkdir(parents=True)

    def write_file() -> tuple[dict, list]:
        data = tensors_to_bytes({box_key(s.name, s.box): s.tensor.contiguous().cpu() for s in saved})
        file = partial / f"rank-{group.rank:05d}.safetensors"
        file.write_bytes(data)
        sync(file)
        boxes = [(s.name, s.dtype, s.shape, s.box.start, s.box.stop) for s in saved]
        return {"checksum": checksum(data), "bytes": len(data)}, boxes

    def commit() -> None:
        if group.rank == 0:
            (partial / INDEX).write_text(format_index(step, state, written))
            sync(partial / INDEX)
            sync(partial)
            if folder.exists():  # the same step, saved before; half deleted, it must not look complete
                remove_folder(replaced)
                folder.rename(replaced)
            partial.rename(folder)
            sync(root)
            remove_folder(replaced)

    on_all_ranks(prepare, group)
    written = on_all_ranks(write_file, group)
    on_all_ranks(commit, group)
    return folder


def format_index(step: int, state: dict, written: Sequence[tuple[dict, list]]) -> str:
    """Return the text of checkpoint.json. written: for each rank, the entry of its file and the boxes in it."""
    files, tensors, partitions = {}, {}, {}
    for rank, (entry, boxes) in enumerate(written):
        files[f"rank-{rank:05d}.safetensors"] = entry
        for name, dtype, shape, start, stop in boxes:
            tensors.setdefault(name, {"dtype": dtype, "shape": shape, "partition": len(tensors)})
            partitions.setdefault(name, []).append([rank, start, stop])
    body = {"step": step, "state": state, "checksum": CHECKSUM, "files": files, "tensors": tensors}
    body["partitions"] = list(partitions.values())
    return json.dumps({"format": FORMAT, "sha256": index_digest(body), **body}, allow_nan=False)


def index_digest(body: dict) -> str:
    """Return the SHA-256 of an index, without `format` and `sha256` themselves."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Delete a folder with all that it contains, if it exists."""
    if folder.exists():
        shutil.rmtree(folder)


def prune(just_saved: Path, keep: int) -> None:
    """Delete all complete checkpoints beside `just_saved` but the newest `keep`, and what crashes left unfinished.

    keep: at least 1. The one just saved stays, even if `keep` later steps have checkpoints: a run that found these
    damaged has resumed from an earlier one.
    """
    root = just_saved.parent
    for folder in complete_checkpoints(root)[:-keep]:
        if folder != just_saved:
            folder.rename(folder.with_name(folder.name + ".partial"))  # so that it stops counting as complete at once
    for unfinished in root.glob("step-*.partial"):
        remove_folder(unfinished)


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the folders of all complete checkpoints in `root`, oldest first."""
    found = root.iterdir() if root.is_dir() else ()
    return sorted(path for path in found if re.fullmatch(r"step-\d{8,}", path.name))


def read_index(folder: Path) -> dict:
    """Return the index of a checkpoint. Raises DamagedError if it cannot be read, or is not what was written."""
    try:
        body = json.loads((folder / INDEX).read_bytes())
        version, digest = body.pop("format"), body.pop("sha256")
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise DamagedError(f"{folder / INDEX} cannot be read: {error}") from error
    if version != FORMAT or digest != index_digest(body):
        raise DamagedError(f"{folder / INDEX} is damaged, or of another format than {FORMAT}")
    return body


def saved_boxes(index: Mapping[str, Any], name: str) -> list[tuple[str, Box]]:
    """Return where a tensor is saved, as (file, box). The fast trainer writes a flat range as two numbers."""
    files = sorted(index["files"])
    entry = index["tensors"][name]
    found = []
    for number, start, stop in index["partitions"][entry["partition"]]:
        is_flat = isinstance(start, int)
        boxes = flat_boxes(tuple(entry["shape"]), start, stop) if is_flat else [Box(tuple(start), tuple(stop))]
        found += [(files[number], box) for box in boxes]
    return found


def load(folder: Path, shards: Sequence[Shard], group: Group) -> dict:
    """Collective: fill the tensors of `shards` from a checkpoint of any layout; return its index.

    A rank reads only files with a box that overlaps one of its shards, and no rank changes a tensor before all ranks
    know that all they need is there and undamaged. Raises DamagedError or UserError on all ranks.
    """
    copies: list[tuple[Tensor, Tensor]] = []

    def read() -> dict:
        index = read_index(folder)
        read_file = cache(lambda file: read_tensors(folder / file, index["files"][file]["checksum"]))
        for shard in shards:
            entry = index["tensors"].get(shard.name)
            here = {"dtype": shard.dtype, "shape": list(shard.shape)}
            if entry is None or {key: entry[key] for key in here} != here:
                raise UserError(f"{shard.name} is {entry} in {folder}, and {here} in this run")
            found = 0
            for file, box in saved_boxes(index, shard.name):
                if overlap := box.intersect(shard.box):
                    values = read_file(file)[box_key(shard.name, box)][overlap.slices_in(box)]
                    copies.append((shard.tensor[overlap.slices_in(shard.box)], values))
                    found += overlap.numel
            if found != shard.box.numel:
                raise DamagedError(f"{folder} has {found} of the {shard.box.numel} elements of {shard.name}")
        return index

    indexes = on_all_ranks(read, group)
    with torch.no_grad():
        for target, values in copies:
            target.copy_(values)
    return indexes[group.rank]


def read_tensors(file: Path, expected: str) -> dict[str, Tensor]:
    """Return the tensors of a file by key. Raises DamagedError if the `checksum` of its bytes is not `expected`."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error}") from error
    if checksum(data) != expected:
        raise DamagedError(f"{file} is damaged")
    return tensors_from_bytes(data)
