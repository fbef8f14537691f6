"""A checkpoint that is whole or absent.

A crash in the middle of a save must not leave a checkpoint that looks complete. Let every rank write its shards, and
let rank 0 turn the files into a checkpoint, so that after a crash at any moment the checkpoint is complete or absent.

root: the Path of a folder that all ranks share. shards: this rank's Shards, each with name, shape (of the global
tensor), box (the part of it: box.start, box.stop, box.numel), tensor, dtype ("float32") and is_saved_here. Any folder
named like step-00000100 counts as a checkpoint. Result: the Path of the folder, on all ranks.

Example: on 2 ranks that hold the rows 0 to 2 and 3 to 5 of "params/w", a tensor of shape (6, 4),
    save(root, 7, shards, {"step": 7}, group)   returns root / "step-00000007" on both
This folder holds rank-00000.safetensors, with the key "params/w[0:3,0:4]" and 12 numbers, rank-00001.safetensors, with
"params/w[3:6,0:4]" and 12 numbers, and checkpoint.json (INDEX). While it is written it is called step-00000007.partial.
The number of a file is group.rank, the rank's index in the group. A rank with nothing to save writes a file, too.
A shard without elements may be left out.

Checked: the files on 1 to 4 ranks, also in a group of some of the ranks, and with a rank that has nothing to save; that
folders are made before files are written into them, by one rank; a simulated crash before and after each change of the
disk, in which changes that were not synced are lost or kept; an error on any one rank, after which all ranks must raise
RunError and no checkpoint may appear (if only the last sync fails, it may); the files that an earlier attempt left
behind; a step that was saved before, whose folder is replaced, also if the machine crashes when half of its files have
been deleted; and that the same step can be saved after each of these crashes.

You may call:
    on_all_ranks(action, group) -> list   the results of action() on all ranks; RunError on all if one raised
    box_key(name, box)   the key of a box in a file; tensors_to_bytes({key: tensor}) -> bytes   contiguous, on the CPU
    checksum(data: bytes) -> str, of a file
    format_index(step, state, written) -> str   the text of checkpoint.json; written: for each rank, in rank order,
        ({"checksum": str, "bytes": length of its file}, [(name, dtype, shape, start, stop) for each box in it])
    path.mkdir(parents=True), path.write_bytes(data), path.write_text(text), path.rename(new)   raise OSError
    path.exists()   True or False
    sync(path)   waits until a file's bytes, or a folder's entries, are on disk
    remove_folder(path)   if it exists, one file after the other

Check it with: python -m exercises check atomic_save

Stub 29275428.
"""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save as tensors_to_bytes

from minidist.comm import Group
from minidist.simple.checkpoint import INDEX, Shard, box_key, checksum, format_index, on_all_ranks, remove_folder, sync


def save(root: Path, step: int, shards: Sequence[Shard], state: dict, group: Group) -> Path:
    """Collective: save the checkpoint of `step` in the folder `root`, which all ranks share; return its folder.

    shards: this rank's; over all ranks, those with `is_saved_here` have every element once. state: a JSON object of
    rank 0. The order matters: files, then the index, then the rename, each on disk before the next, so a crash at any
    moment leaves this checkpoint whole or unfinished, and every earlier one as it was. Raises RunError on all ranks.
    """
    raise NotImplementedError("write and sync the files of all ranks in a partial folder, the index last; rename it")
