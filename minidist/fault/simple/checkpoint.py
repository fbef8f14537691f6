"""Simple checkpoints: boxes (index ranges) of global tensors, whole or absent after a crash, for any layout (7.1, 7.2).

Restrictions: a rank reads whole files into memory, a save blocks training, and a step is saved once. The fast version
is `minidist.checkpoint`.
"""

import hashlib
import json
import re
from collections.abc import Sequence

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from minidist.checkpoint.shards import TensorShard, shard_key, shards_to_save
from minidist.comm import Group, bind_all_gather_object
from minidist.errors import DamagedError, UserError
from minidist.fault.collective_errors import run_on_all_ranks
from minidist.fault.disk import Disk
from minidist.parameters import Box


def save(disk: Disk, step: int, shards: Sequence[TensorShard], state: dict, group: Group) -> str:
    """Collective: save the checkpoint of `step`; return the name of its folder, like `step-00000100`.

    A crash at any moment leaves all of this checkpoint or nothing of it, and every earlier one as it was: everything is
    written and synced in `step-00000100.partial`, the index last, and then that folder is renamed. Each rank writes the
    shards that it saves to its own file, `rank-00000.safetensors`. Rank 0 writes `index.json`: a line with the SHA-256
    of the rest, and a JSON object

        {"state": state, "files": {file: SHA-256}, "tensors": {name: {"dtype": "float32", "shape": [6, 4],
         "boxes": [{"start": [0, 0], "stop": [3, 4], "file": "rank-00000.safetensors", "key": key in the file}]}}}

    shards: this rank's; over all ranks, the shards with `is_saved_here` cover every element once. state: a JSON object;
    rank 0's is saved. Raises ErrorOnAnyRank on all ranks if any of them failed. Then nothing is saved, except
    that the whole checkpoint may be there if only the last sync, after the rename, failed.
    """
    folder, gather = f"step-{step:08d}", bind_all_gather_object(group)
    partial, file = f"{folder}.partial", f"rank-{group.rank:05d}.safetensors"

    def write_shards() -> tuple[str, list]:
        data = tensors_to_bytes({shard_key(s): s.tensor.detach().contiguous() for s in shards_to_save(shards)})
        disk.write(f"{partial}/{file}", data)
        disk.sync(f"{partial}/{file}")
        described = [(s.name, s.dtype_name, s.shape, s.box, shard_key(s)) for s in shards_to_save(shards)]
        return hashlib.sha256(data).hexdigest(), described

    def commit() -> None:
        index: dict = {"state": state, "files": {}, "tensors": {}}
        for rank, (digest, described) in enumerate(written):
            index["files"][name_of_file := f"rank-{rank:05d}.safetensors"] = digest
            for name, dtype, shape, box, key in described:
                tensor = index["tensors"].setdefault(name, {"dtype": dtype, "shape": shape, "boxes": []})
                tensor["boxes"].append({"start": box.start, "stop": box.stop, "file": name_of_file, "key": key})
        body = json.dumps(index).encode()
        disk.write(f"{partial}/index.json", hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        disk.sync(f"{partial}/index.json")
        disk.sync(partial)
        disk.rename(partial, folder)
        disk.sync("")

    on_rank_0 = group.rank == 0
    run_on_all_ranks(gather, lambda: disk.remove(partial) if on_rank_0 else None)  # the rest of an earlier attempt
    written = run_on_all_ranks(gather, write_shards)
    run_on_all_ranks(gather, lambda: commit() if on_rank_0 else None)
    return folder


def complete_checkpoints(disk: Disk) -> list[str]:
    """Return the names of the folders of all complete checkpoints, oldest first."""
    return [name for name in disk.names() if re.fullmatch(r"step-\d{8}", name)]


def read_index(disk: Disk, folder: str) -> dict:
    """Return the index of a checkpoint: the JSON object that `save` describes. Raises DamagedError."""
    try:
        digest, body = disk.read(f"{folder}/index.json").split(b"\n", 1)
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder}/index.json cannot be read: {error}") from error
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedError(f"{folder}/index.json is damaged")
    return json.loads(body)


def load(disk: Disk, folder: str, shards: Sequence[TensorShard], group: Group) -> dict:
    """Collective: fill the tensors of `shards` from a checkpoint that any layout has saved; return its state.

    folder: as `save` returned it. shards: this rank's; their tensors are overwritten in place. A rank reads only files
    with a box that overlaps one of its shards. No rank writes to a tensor before all ranks know that every file they
    need matches its SHA-256, and that every element of every shard is in the checkpoint. Raises ErrorOnAnyRank
    on all ranks if a file is damaged (`found_damage`), or a tensor is missing or has another shape or dtype.
    """
    copies: list[tuple[Tensor, Tensor]] = []

    def plan() -> dict:
        index, files = read_index(disk, folder), {}
        for shard in shards:
            saved, found = index["tensors"].get(shard.name, {"shape": None, "dtype": None, "boxes": []}), 0
            if (saved["shape"], saved["dtype"]) != ([*shard.shape], shard.dtype_name):
                raise UserError(
                    f"{shard.name} is {saved['dtype']} {saved['shape']} in {folder}, not {shard.shape} here"
                )
            for entry in saved["boxes"]:
                file, box = entry["file"], Box(tuple(entry["start"]), tuple(entry["stop"]))
                if (overlap := box.intersect(shard.box)) is None:
                    continue
                if file not in files:
                    files[file] = read_tensors(disk, f"{folder}/{file}", index["files"][file])
                values = files[file][entry["key"]][overlap.slices_in(box)]
                copies.append((shard.tensor.detach()[overlap.slices_in(shard.box)], values))
                found += overlap.numel
            if found != shard.box.numel:
                raise UserError(f"{folder} has {found} of the {shard.box.numel} elements of {shard_key(shard)}")
        return index["state"]

    states = run_on_all_ranks(bind_all_gather_object(group), plan)
    for target, values in copies:
        target.copy_(values)
    return states[group.rank]


def read_tensors(disk: Disk, file: str, digest: str) -> dict[str, Tensor]:
    """Return the tensors in a checkpoint's file, by key. Raises DamagedError if its SHA-256 is not `digest` (hex)."""
    try:
        data = disk.read(file)
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise DamagedError(f"{file} is damaged")
    return tensors_from_bytes(data)
