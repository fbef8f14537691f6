"""Save and load checkpoints: boxes of named global tensors, which any layout can load.

save    describe -> write -> commit: each rank writes its boxes to its own file in a temporary folder; rank 0 adds the
        index and renames the folder. Until then the previous checkpoint stays the latest.
load    plan -> verify -> read: no tensor is written before every rank knows that all shapes and dtypes match and all
        checksums are right.

Both are collective: after each phase the ranks exchange its outcome (`run_on_all_ranks`), and all of them continue or
all of them raise. The exchange is an argument, `gather_alone` or an all-gather over a group, so that this module does
not import `comm`.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from minidist.errors import RunError, UserError
from minidist.fault import folders, shards
from minidist.fault.agree import CollectiveError, GatherObjects, gather_alone, run_on_all_ranks
from minidist.fault.index import (
    NAME,
    DamagedError,
    FileEntry,
    Index,
    find_damage,
    format_index,
    parse_index,
    verify_checkpoint,
)
from minidist.fault.shards import TensorShard


def save_checkpoint(
    root: str | Path,
    step: int,
    pieces: Iterable[TensorShard],
    state: dict,
    exchange: GatherObjects = gather_alone,
    rank: int = 0,
) -> Path:
    """Write the checkpoint of `step` into the folder `root`; returns its folder. Collective over the group.

    pieces: this rank's shards; over all ranks, those with `writes` must cover every element exactly once.
    state: a JSON object (configuration, position, fingerprint of the corpus); rank 0's is saved.
    exchange: takes this rank's value, returns the values of all ranks of the group in order. rank: index in the group.
    Raises RunError, the same on all ranks, if any of them failed; earlier checkpoints are not changed.
    """
    root, pieces = Path(root), list(pieces)
    folder = folders.partial_folder(root, step)
    tensors: dict[str, shards.SavedTensor] = {}

    def describe():
        if rank == 0:
            folders.create_partial_folder(folder)
        return step, shards.describe_shards(pieces, _file(rank))

    def write():
        if len(steps := sorted({at for at, _ in plans})) > 1:
            raise ValueError(f"the ranks are not at the same step: {steps}")
        tensors.update(shards.merge_descriptions(description for _, description in plans))
        if not folder.is_dir():
            raise OSError(f"{folder}, which rank 0 made, is not here: the folder is not shared by all ranks")
        return _write(folder / _file(rank), pieces)

    def commit():
        if rank > 0:
            return
        files = {_file(at): entry for at, entry in enumerate(entries) if entry}
        for name, entry in files.items():
            if not (seen := folder / name).exists() or seen.stat().st_size != entry.bytes:
                raise OSError(f"{seen}, which another rank wrote, is not here: the folder is not shared by all ranks")
        (folder / NAME).write_text(format_index(step, state, files, tensors))
        folders.fsync(folder / NAME)
        folders.commit_checkpoint(root, step)

    try:
        plans = run_on_all_ranks(exchange, describe)
        entries = run_on_all_ranks(exchange, write)
        run_on_all_ranks(exchange, commit)
    except CollectiveError as failure:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        found = folders.complete_checkpoints(root)
        last = f"the last complete one is {found[max(found)]}" if found else "there is no earlier one"
        raise RunError(
            f"the checkpoint of step {step} was not written to {root}: {failure} Nothing else changed; {last}."
        ) from failure.__cause__
    return folders.complete_folder(root, step)


def read_index(path: str | Path) -> Index:
    """Read the index of the checkpoint in folder `path`: its step, state and tensors.

    Raises UserError if the index is damaged; the message names an intact checkpoint in the same folder.
    """
    try:
        return parse_index(Path(path))
    except DamagedError as error:
        raise UserError(f"{error}. {_instead(Path(path))}") from error


def load_checkpoint(
    path: str | Path,
    pieces: Iterable[TensorShard],
    exchange: GatherObjects = gather_alone,
    rank: int = 0,
    *,
    cast: bool = False,
    prefix: str = "",
) -> Index:
    """Load the checkpoint in folder `path`, saved by any layout, into the tensors of `pieces`; returns its index.

    Collective over the group; `exchange` and `rank` as in `save_checkpoint`. Each rank reads only the slices that it
    needs, and the ranks share the work of verifying the checksums.
    cast: convert saved tensors to the dtypes of `pieces`; if False, another dtype is an error.
    prefix: every saved tensor whose name starts with it must be loaded by some rank. `params/` loads a model without
        its optimizer.
    Raises UserError, the same on all ranks and before any tensor is written, if the checkpoint is damaged (naming an
    intact one) or if its tensors, shapes or dtypes do not match `pieces`; RunError if reading fails later.
    """
    path, pieces = Path(path), list(pieces)
    reads: dict[str, list] = {}
    index: Index

    def plan():
        nonlocal index, reads
        index = parse_index(path)
        reads, problems = _plan(index, pieces, cast)
        return index.sha256, {piece.name for piece in pieces}, set(reads), problems

    def check():
        names = sorted(set().union(*(files for _, _, files, _ in plans)))
        if problems := find_damage(index, names[rank :: len(plans)]):
            raise DamagedError("; ".join(problems))

    try:
        plans = run_on_all_ranks(exchange, plan)
        _check_fits(index, plans, prefix)
        run_on_all_ranks(exchange, check)
        run_on_all_ranks(exchange, lambda: _read(index, reads))
    except CollectiveError as failure:
        if not failure.damaged:
            raise RunError(f"{path} could not be loaded: {failure}") from failure.__cause__
        # Only rank 0 searches, since it may have to read every byte of the other checkpoints.
        instead = exchange(_instead(path) if rank == 0 else None)[0]
        raise UserError(f"{failure} {instead}") from failure.__cause__
    return index


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write(file: Path, pieces: list[TensorShard]) -> FileEntry | None:
    """Write this rank's boxes and wait until they are on disk; returns None if there are none."""
    tensors = {
        shards.shard_key(piece): piece.tensor.detach().cpu().contiguous() for piece in shards.shards_to_save(pieces)
    }
    if not tensors:
        return None
    try:
        file.touch()
        mode = file.stat().st_mode  # safetensors writes a new file that only its owner may read
        save_file(tensors, file)
        file.chmod(mode)
        folders.fsync(file)
        return FileEntry.of(file)
    except Exception as error:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        free = shutil.disk_usage(file.parent).free
        raise OSError(f"{error} (writing {size:,} bytes to {file}, where {free:,} are free)") from error


def _plan(index: Index, pieces: list[TensorShard], cast: bool) -> tuple[dict[str, list], list[str]]:
    """Return what to read, file -> [(shard, saved box, shared box)], and the mismatches, one line each."""
    reads: dict[str, list] = {}
    problems = []
    for piece in pieces:
        stored = index.tensors.get(piece.name)
        if stored is None:
            problems.append(f"{piece.name} is not in the checkpoint")
        elif stored.shape != piece.shape:
            problems.append(f"{piece.name} has shape {stored.shape} in the checkpoint, {piece.shape} here")
        elif stored.dtype != piece.dtype and not cast:
            problems.append(f"{piece.name} is {stored.dtype} in the checkpoint, {piece.dtype} here")
        else:
            shared = shards.find_overlaps(piece, stored)
            if sum(box.numel for _, box in shared) != piece.box.numel:
                problems.append(f"{shards.shard_key(piece)} is not wholly in the checkpoint")
            for source, box in shared:
                reads.setdefault(source.file, []).append((piece, source, box))
    return reads, problems


def _check_fits(index: Index, plans: list[tuple], prefix: str) -> None:
    if len({sha256 for sha256, *_ in plans}) > 1:
        raise UserError(f"the ranks see different checkpoints at {index.path}: give a folder that all of them share")
    wanted = set().union(*(names for _, names, _, _ in plans))
    problems = list(dict.fromkeys(line for *_, lines in plans for line in lines))
    if len(problems) > 5:
        problems[5:] = [f"and {len(problems) - 5} more like these"]
    if extra := [name for name in index.tensors if name.startswith(prefix) and name not in wanted]:
        more = ", ..." if len(extra) > 4 else ""
        problems.append(f"no place here for {len(extra)} of its tensors: {', '.join(extra[:4])}{more}")
    if problems:
        raise UserError(
            "\n  ".join([f"{index.path} does not fit this run:", *problems])
            + "\nUse the model, optimizer and precision it was saved with, or start a new run."
        )


def _read(index: Index, reads: dict[str, list]) -> None:
    for file, boxes in reads.items():
        with safe_open(index.path / file, framework="pt") as stream:
            for piece, source, box in boxes:
                whole = not box.shape  # a scalar cannot be sliced
                values = (
                    stream.get_tensor(source.key) if whole else stream.get_slice(source.key)[box.within(source.box)]
                )
                piece.tensor.detach()[box.within(piece.box)].copy_(values)


def _instead(path: Path) -> str:
    """Return a sentence that names the nearest intact checkpoint in the same folder, preferably an earlier one."""
    own = path.resolve()
    found = folders.complete_checkpoints(own.parent)
    at = next((step for step, folder in found.items() if folder == own), max(found, default=0) + 1)
    for step in sorted(found, key=lambda step: (step > at, abs(step - at))):
        if found[step] != own and not verify_checkpoint(found[step]):
            return f"Resume from {found[step]} instead, which is intact."
    return f"No other checkpoint in {own.parent} is intact."
