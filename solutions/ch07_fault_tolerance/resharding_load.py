"""A checkpoint that any layout loads: the solution, as it stands in minidist.fault.simple.checkpoint.

The layout of the run that saved does not matter, because neither side knows the other: both describe what they hold
as boxes of global tensors. PyTorch's distributed checkpoint does the same. Every combination of data, tensor and
pipeline parallelism and ZeRO is a set of boxes, so one loop over overlaps replaces a converter for each pair of
layouts.

Verification comes before the first copy, on all ranks: a half-loaded model is neither the old nor the new one, and
its loss may look plausible. Counting the elements of the overlaps finds a checkpoint that lacks a part, for which no
checksum is wrong. A rank reads only what it needs: with a thousand ranks, each reading all files would read the
checkpoint a thousand times.

Usual wrong answers:
* each rank plans alone: one raises, the others load
* requires some overlap instead of all elements
* converts another dtype silently
* the package's own
* loads nothing, and returns the state
* copies as soon as a file is read: the other ranks have loaded when one finds the damage
* reads all files on all ranks
* stops at the first box that overlaps
* indexes the saved box with the coordinates of the global tensor
* gives a view new memory instead of filling that of the shard
* gives the tensor new memory: the larger tensor, of which it is a view, keeps its old values
* does not notice that elements are missing
* reads the files without comparing their SHA-256
* compares the numbers of elements instead of the shapes: loads a part of a transposed tensor
* loads the shards with is_saved_here only: replicas keep their old values
* a rank without shards returns no state
* loads only boxes that are saved as they are
* does not compare the global shapes: a tensor of 12 elements takes the first of 11
* verifies before it copies, but on each rank alone: the others load while one raises
* fills everything with zeros
"""

from collections.abc import Sequence

from torch import Tensor

from minidist.comm import Group, bind_all_gather_object
from minidist.errors import UserError
from minidist.fault.agree import run_on_all_ranks
from minidist.fault.disk import Disk
from minidist.fault.shards import TensorShard, shard_key
from minidist.fault.simple.checkpoint import read_index, read_tensors
from minidist.parameters import Box


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
