"""A checkpoint that any layout loads.

A checkpoint holds boxes of named global tensors; the new ranks hold other boxes of them. Copy from each saved box the
part that overlaps a shard of this rank, after everything has been verified.

folder: the Path that `save` returned. shards: this rank's Shards, each with name, shape (of the global tensor), box,
tensor (in the shape of the box, which may be empty) and dtype. Result: the index, a dict like
    {"state": {"step": 7}, "files": {"rank-00000.safetensors": {"checksum": str, "bytes": int}, ...},
     "tensors": {"params/w": {"dtype": "float32", "shape": [7, 5], ...}, ...}, ...}
Example: rows 0 to 3 and 4 to 6 of a tensor of shape (7, 5) were saved, and this rank holds the columns 2 and 3, a box
from (0, 2) to (7, 4). The first saved box, (0, 0) to (4, 5), overlaps it in the box from (0, 2) to (4, 4): rows 0 to 3
of both, columns 2 and 3 of the saved tensor, columns 0 and 1 of the shard.

Checked: checkpoints of 1 to 4 ranks in rows, columns and blocks, loaded by 1 to 4 ranks into other boxes, also of
sizes that do not divide; that the given memory is filled, of parameters and of views, too; that a rank reads only files
with a box that overlaps one of its shards, and each once; and damaged files, missing elements and wrong shapes and
dtypes. With these all ranks must raise, DamagedError for damage and missing elements, UserError for a wrong shape or
dtype and for a name that the checkpoint does not have, also of an empty shard, with a message that names the tensor or
the file, and no element of any tensor on any rank may change; also in a second load, if a file has been damaged since
the first. If more than one is wrong, any of these errors will do.

You may call:
    read_index(folder) -> dict; read_tensors(file: Path, checksum) -> {key: tensor}   DamagedError if damaged
    saved_boxes(index, name) -> list   of (file name, Box), where a tensor is saved; box_key(name, box)   its key there
    on_all_ranks(action, group) -> list   copies of all ranks' results of action(); its UserError or DamagedError on all
    Box(start: tuple, stop: tuple), box.intersect(other), box.slices_in(outer), box.numel
    UserError(message), DamagedError(message); functools.cache(function)   calls it once per argument

Check it with: python -m exercises check resharding_load

Stub dce36e8f.
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
    raise NotImplementedError("plan and verify on all ranks, then copy the overlaps of saved boxes and shards")
