"""A checkpoint that is whole or absent.

A crash in the middle of a save must not leave a checkpoint that looks complete. Let every rank write its shards, and
let rank 0 turn the files into a checkpoint, so that after a crash at any moment the checkpoint is complete or absent.

disk: see minidist/fault/disk.py; names are like "step-00000100/index.json". shards: TensorShards of this rank, with
name, shape (of the global tensor), box (start and stop of the part in it), tensor and is_saved_here. Any folder named
like step-00000100 counts as a checkpoint. Example: on 2 ranks that hold the rows 0 to 2 and 3 to 5 of "params/w", a
tensor of shape (6, 4), save(disk, 7, shards, {"step": 7}, group) returns "step-00000007" on both, a folder that holds
rank-00000.safetensors with 12 numbers, rank-00001.safetensors with 12 numbers, and index.json.

Checked: the files on 1 to 4 ranks, also in a group of some of the ranks, and with a rank that has nothing to save; a
simulated crash before and after each change of the disk, in which changes that were not synced are lost or kept; an
error on any one rank, after which all ranks must raise ErrorOnAnyRank and no checkpoint may appear (if only the last
sync fails, it may); and the files that an earlier attempt left behind.

You may call:
    disk.write(name, data: bytes), disk.sync(name), disk.rename(old, new), disk.remove(name)   raise OSError
    run_on_all_ranks(gather, action) -> list   the results of action() on all ranks; ErrorOnAnyRank if one raised
    bind_all_gather_object(group) -> gather
    shards_to_save(shards)   those that this rank saves; shard_key(shard)   its key in a file; shard.dtype_name
    tensors_to_bytes({key: contiguous tensor}) -> bytes   a safetensors file
    hashlib.sha256(data).hexdigest(), json.dumps(value)

Check it with: python -m exercises check atomic_save

Stub 32ee9309.
"""

import hashlib
import json
from collections.abc import Sequence

from safetensors.torch import save as tensors_to_bytes

from minidist.comm import Group, bind_all_gather_object
from minidist.fault.agree import run_on_all_ranks
from minidist.fault.disk import Disk
from minidist.fault.shards import TensorShard, shard_key, shards_to_save


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
    raise NotImplementedError("write and sync the files of all ranks in a partial folder, the index last; rename it")
