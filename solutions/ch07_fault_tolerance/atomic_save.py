"""A checkpoint that is whole or absent: the solution, as it stands in minidist.fault.simple.checkpoint.

A rename is the one operation of a file system that happens entirely or not at all. So everything is written under a
name that does not count, and given the name that counts when every byte is on disk. "Written" is not "on disk":
without fsync the rename may reach the disk before the bytes, and a crash leaves a complete name with empty files. The
same holds for the entries of a folder, which is why the folder is synced as well.

On many ranks one more thing can go wrong: a rank whose disk is full. If rank 0 went on without it, the checkpoint
would lack a file; if that rank raised alone, the others would wait for it for ever. So the ranks exchange their
outcomes after each phase. The SHA-256 of each file is for what no rename can prevent: bits that flip later on the
disk.

Usual wrong answers:
* the rank whose disk is full raises alone; the others wait for it for ever
* the package's own
* the SHA-256 of the tensors' bytes, and not of the file
* writes nothing, and returns a name
* makes room by removing the earlier checkpoint first: a crash leaves none
* names the files by the global ranks, and lists those of the ranks in the group
* does not sync the files of the ranks: the rename may reach the disk before their bytes
* does not sync the partial folder: files may lose their names
* the process with global rank 0 commits: nobody does in a group without it
* writes into the final folder: it counts as a checkpoint from its first file on
* does not sync the index
* ignores the error of the last sync: returns although a crash may lose the checkpoint
* leaves the files of an earlier attempt where they are
* a rank without shards to save writes no file, and the index lists one
* saves the shapes of the shards instead of the global ones
* the other ranks do not learn that rank 0 has failed
* every rank removes the partial folder, while another one removes the same files
* removes the partial folder after the save, when it is no longer there
* returns before the rename is on disk
* renames, and then writes the index
* saves all shards, also those that another rank saves
* syncs the root before the rename, which is then not on disk
* saves what the other ranks have written
* saves zeros
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
