"""A checkpoint that any layout loads.

A checkpoint holds boxes of named global tensors; the new ranks hold other boxes of them. Copy from each saved box the
part that overlaps a shard of this rank, after everything has been verified.

disk, folder: as for `save`. shards: TensorShards of this rank, each with name, shape (of the global tensor), box,
tensor (in the shape of the box) and dtype_name. read_index returns a dict like
    {"state": {"step": 7}, "files": {"rank-00000.safetensors": SHA-256, ...}, "tensors": {"params/w": {"dtype":
     "float32", "shape": [7, 5], "boxes": [{"start": [0, 0], "stop": [4, 5], "file": "rank-00000.safetensors",
                                            "key": the tensor's key in the file}, ...]}}}
Example: rows 0 to 3 and 4 to 6 of a tensor of shape (7, 5) were saved, and this rank holds the columns 2 and 3, a box
from (0, 2) to (7, 4). The first saved box, (0, 0) to (4, 5), overlaps it in the box from (0, 2) to (4, 4): rows 0 to 3
of both, columns 2 and 3 of the saved tensor, columns 0 and 1 of the shard.

Checked: checkpoints of 1 to 4 ranks in rows, columns and blocks, loaded by 1 to 4 ranks into other boxes, also of
sizes that do not divide; the files that are read; and damaged files and wrong shapes. With these, all ranks must raise
ErrorOnAnyRank with a message that names the tensor or the file, and no element of any tensor on any rank may change.

You may call:
    read_index(disk, folder) -> dict   verified; read_tensors(disk, file, sha256) -> {key: tensor}   verified
    run_on_all_ranks(gather, action) -> list   the results of action() on all ranks; ErrorOnAnyRank if one raised
    bind_all_gather_object(group) -> gather
    Box(start: tuple, stop: tuple), box.intersect(other), box.slices_in(outer), box.numel; shard_key(shard)
    UserError(message)   for what does not fit; DamagedError is raised by read_index and read_tensors

Check it with: python -m exercises check resharding_load

Stub fc4c72ce.
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
    raise NotImplementedError("plan and verify on all ranks, then copy the overlaps of saved boxes and shards")
