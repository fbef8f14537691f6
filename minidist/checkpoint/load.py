"""Load checkpoints: plan -> verify -> read.

No tensor is written before every rank knows that all shapes and dtypes match and all checksums are right. Each phase
ends in an exchange of its outcome (`run_on_all_ranks`), after which all ranks continue or all of them raise.
`all_gather_object` is an argument, so that this module does not import `comm`.
"""

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from minidist.checkpoint import folders, shards
from minidist.checkpoint.index import Index, find_damaged_files, read_index_file, verify_checkpoint
from minidist.checkpoint.shards import TensorShard
from minidist.checkpoint.tensor_file import FORMAT_NAMES
from minidist.errors import DamagedError, MisfitError, RunError, UserError
from minidist.fault.collective_errors import ErrorOnAnyRank, GatherObjects, gather_single_rank, run_on_all_ranks


def read_index(path: str | Path) -> Index:
    """Read the index of the checkpoint in folder `path`: its step, state and tensors.

    Raises DamagedError if the index is damaged; the message names an intact checkpoint in the same folder.
    """
    try:
        return read_index_file(Path(path))
    except DamagedError as error:
        raise DamagedError(f"{error}. {_suggest_intact(Path(path))}") from error


def load_checkpoint(
    path: str | Path,
    local_shards: Iterable[TensorShard],
    all_gather_object: GatherObjects = gather_single_rank,
    rank: int = 0,
    *,
    cast: bool = False,
    prefix: str = "",
) -> Index:
    """Collective: load the checkpoint in folder `path`, saved by any layout, into `local_shards`; return its index.

    local_shards: this rank's shards, whose tensors are overwritten in place. all_gather_object, rank: as in
    `CheckpointSaver`. Each rank reads only the slices that it needs, and the ranks share the work of verifying the
    checksums.
    cast: convert saved tensors to the dtypes of `local_shards`; if False, a different dtype is an error. prefix: every
    saved tensor whose name starts with it must be loaded by some rank; "" means all tensors. With "params/", a model
    can be loaded without its optimizer.
    Raises, the same on all ranks and before any tensor is written, DamagedError if the checkpoint is damaged (naming an
    intact one), or MisfitError if its tensors, shapes or dtypes do not match `local_shards`; RunError if reading fails
    later.
    """
    path = Path(path)
    local_shards = list(local_shards)
    reads: dict[str, list] = {}
    index: Index

    def plan():
        nonlocal index, reads
        index = read_index_file(path)
        reads, problems = shards.plan_reads(index.tensors, local_shards, cast)
        return index.sha256, {shard.name for shard in local_shards}, set(reads), problems

    def check():
        names = sorted(set().union(*(files for _, _, files, _ in plans)))
        if problems := find_damaged_files(index, names[rank :: len(plans)]):
            raise DamagedError("; ".join(problems))

    try:
        plans = run_on_all_ranks(all_gather_object, plan)
        _check_fits(index, plans, prefix)
        run_on_all_ranks(all_gather_object, check)
        run_on_all_ranks(all_gather_object, lambda: _check_headers(index, reads))
        run_on_all_ranks(all_gather_object, lambda: _read_into_shards(index, reads))
    except ErrorOnAnyRank as failure:
        if not failure.found_damage:
            raise RunError(f"{path} could not be loaded: {failure}") from failure.__cause__
        # Only rank 0 searches, since it may have to read every byte of the other checkpoints.
        suggestion = all_gather_object(_suggest_intact(path) if rank == 0 else None)[0]
        raise DamagedError(f"{failure} {suggestion}") from failure.__cause__
    return index


def _check_fits(index: Index, plans: list[tuple], prefix: str) -> None:
    """Raise UserError if ranks see different checkpoints, MisfitError if tensors do not match the shards to load.

    plans: for each rank the index's SHA-256, the names of its shards, the files to read, and its mismatches as text.
    prefix: as in `load_checkpoint`.
    """
    if len({sha256 for sha256, *_ in plans}) > 1:
        raise UserError(f"the ranks see different checkpoints at {index.path}: give a folder that all of them share")
    loaded_names = set().union(*(names for _, names, _, _ in plans))
    problems = list(dict.fromkeys(line for *_, lines in plans for line in lines))
    if len(problems) > 5:
        problems[5:] = [f"and {len(problems) - 5} more like these"]
    if extra := [name for name in index.tensors if name.startswith(prefix) and name not in loaded_names]:
        more = ", ..." if len(extra) > 4 else ""
        problems.append(f"no place here for {len(extra)} of its tensors: {', '.join(extra[:4])}{more}")
    if problems:
        raise MisfitError(
            "\n  ".join([f"{index.path} does not fit this run:", *problems])
            + "\nUse the model, optimizer and precision it was saved with, or start a new run."
        )


def _check_headers(index: Index, reads: dict[str, list]) -> None:
    """Raise DamagedError unless the files hold the boxes to read, in the dtypes and shapes that the index gives."""
    for file, boxes in reads.items():
        try:
            with safe_open(index.path / file, framework="pt") as stream:
                for shard, source, _ in boxes:
                    key = shard.name + shards.format_box(source.box)
                    header = stream.get_slice(key)
                    found = header.get_dtype(), tuple(header.get_shape())
                    listed = FORMAT_NAMES[shards.DTYPES[index.tensors[shard.name].dtype_name]], source.box.shape
                    if found != listed:
                        raise DamagedError(f"{index.path / file} has {key} as {found}, its index as {listed}")
        except SafetensorError as error:
            raise DamagedError(f"{index.path / file} is not the file that its index describes: {error}") from error


def _read_into_shards(index: Index, reads: dict[str, list]) -> None:
    """Read this rank's boxes into its shards, in place. reads: from `plan_reads`."""
    for file, boxes in reads.items():
        with safe_open(index.path / file, framework="pt") as stream:
            for shard, source, box in boxes:
                key = shard.name + shards.format_box(source.box)
                whole = not box.shape  # a scalar cannot be sliced
                values = stream.get_tensor(key) if whole else stream.get_slice(key)[box.slices_in(source.box)]
                shard.tensor.detach()[box.slices_in(shard.box)].copy_(values)


def _suggest_intact(path: Path) -> str:
    """Return a sentence that names the nearest intact checkpoint in the same folder, preferably an earlier one."""
    own = path.resolve()
    found = folders.complete_checkpoints(own.parent)
    at = next((step for step, folder in found.items() if folder == own), max(found, default=0) + 1)
    for step in sorted(found, key=lambda step: (step > at, abs(step - at))):
        if found[step] != own and not verify_checkpoint(found[step]):
            return f"Resume from {found[step]} instead, which is intact."
    return f"No other checkpoint in {own.parent} is intact."
