"""A checkpoint that is whole or absent: the solution, as it stands in minidist.simple.checkpoint.

A rename is the one operation of a file system that happens entirely or not at all. So everything is written under a
name that does not count, and given the name that counts when every byte is on disk. "Written" is not "on disk":
without fsync the rename may reach the disk before the bytes, and a crash leaves a complete name with empty files. The
same holds for the entries of a folder, which is why the folder is synced as well.

On many ranks one more thing can go wrong: a rank whose disk is full. If rank 0 went on without it, the checkpoint
would lack a file; if that rank raised alone, the others would wait for it for ever. So the ranks exchange their
outcomes after each phase. The checksum of each file is for what no rename can prevent: bits that flip later on the
disk.

Usual wrong answers:
* the rank whose disk is full raises alone; the others wait for it for ever
* the package's own
* the checksum of the tensors' bytes, and not of the file
* writes nothing, and returns a name
* makes room by removing the earlier checkpoint first: a crash leaves none
* cannot rename the old folder if a crash has left one of that name: the step can never be saved again
* names the files by the global ranks, and lists those of the ranks in the group
* does not sync the files of the ranks: the rename may reach the disk before their bytes
* writes into a folder that nobody has made
* does not sync the partial folder: files may lose their names
* the process with global rank 0 commits: nobody does in a group without it
* writes into the final folder: it counts as a checkpoint from its first file on
* does not sync the index
* ignores the error of the last sync: returns although a crash may lose the checkpoint
* leaves the files of an earlier attempt where they are
* every rank makes the partial folder
* saves the state of the last rank
* rank 0 makes the partial folder before any exchange of outcomes: if that fails, it raises OSError alone
* the other ranks do not learn that rank 0 has failed
* every rank removes and makes the partial folder, while another one does the same
* returns before the rename is on disk
* renames, and then writes the index
* does not sync the root if the step was saved before: after a crash neither of the two checkpoints may be left
* saves all shards, also those that another rank saves
* syncs the root before the rename, which is then not on disk
* deletes the earlier folder of the step under its complete name: after a crash, half of its files look complete
* does not make room for a step that was saved before: the rename fails
* saves the shapes of the shards instead of the global ones
* saves what the other ranks have written
* saves zeros
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
