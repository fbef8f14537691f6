"""A checkpoint that any layout loads: the solution, as it stands in minidist.simple.checkpoint.

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
* keeps what it has read for the next call: a file that is damaged after the first load passes in the second
* converts another dtype silently
* the package's own
* loads nothing, and returns the state
* copies as soon as a file is read: the other ranks have loaded when one finds the damage
* skips empty shards before it compares name, shape and dtype: no error if this rank has no element of the wrong
  tensor
* reads all files on all ranks
* stops at the first box that overlaps
* indexes the saved box with the coordinates of the global tensor
* gives a shard that was saved as it is the memory of the file: other tensors on the shard's memory see nothing
* raises UserError for missing elements: an older, complete checkpoint is then not tried
* gives a view new memory instead of filling that of the shard
* gives the tensor new memory: the larger tensor, of which it is a view, keeps its old values
* does not notice that elements are missing
* reads the files without comparing their checksums
* compares the numbers of elements instead of the shapes: loads a part of a transposed tensor
* loads the shards with is_saved_here only: replicas keep their old values
* a rank without shards returns no index
* reads and verifies a file again for each box
* reads and verifies a file again for each shard
* loads only boxes that are saved as they are
* counts the elements of the saved boxes that overlap a shard, not those of the overlaps
* does not compare the global shapes: a tensor of 12 elements takes the first of 11
* returns the state only, without the tables of files and tensors
* verifies before it copies, but on each rank alone: the others load while one raises
* fills everything with zeros
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.errors import DamagedError, UserError
from minidist.simple.checkpoint import Shard, box_key, on_all_ranks, read_index, read_tensors, saved_boxes


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
