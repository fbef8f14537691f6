"""Fault-tolerant training in one file: data parallelism only, saves that block, and one sample per micro-batch.

Further restrictions: a rank reads whole files into memory, and a step is saved once. The fast versions are `checkpoint`
(save and load), `train.agree` (agreement) and `tools/estimate/goodput.py` (the checkpoint interval).

Read in this order:

save, load            a checkpoint: boxes of named global tensors, whole or absent after a crash, for any layout
run_state, resume     the resumed run is the same run
agreed_update         all ranks update, or none
train_step, train     a step, and the loop that survives the death of ranks
recover               the survivors go on without the dead rank, and a new rank gets the state of a healthy one
differing_replicas    which replica differs from the others, and in which tensor
best_interval_s       how often to save
"""

import hashlib
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from minidist.comm import Group, all_gather, all_gather_object, all_reduce, bind_all_gather_object, broadcast
from minidist.comm.handles import CommError
from minidist.errors import DamagedError, UserError
from minidist.fault.agree import CollectiveError, run_on_all_ranks
from minidist.fault.disk import Disk
from minidist.fault.shards import DTYPES, TensorShard, shard_key, shards_to_save
from minidist.hashing import hash64
from minidist.parameters import Box

_COMPLETE = re.compile(r"step-\d{8}")


@dataclass
class Run:
    """A training run on one rank: what is fixed by its configuration, and from `step` on the state that changes.

    model: this rank's replica. optimizer: of its parameters. sample_loss: the loss of a sample, by its number, as a
    scalar tensor. num_samples: in the data set. batch_size: samples per step, of all ranks together. learning_rate: of
    each step number, from 0. seed: of the data order and of dropout. scaler: has `scale`, `update(overflow)`,
    `state_dict()` and `load_state_dict(state)`, as `LossScaler`; None without loss scaling.
    step: number of completed steps. position: number of samples consumed.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sample_loss: Callable[[int], Tensor]
    num_samples: int
    batch_size: int
    learning_rate: Callable[[int], float]
    seed: int = 0
    scaler: Any = None
    step: int = 0
    position: int = 0


def save(disk: Disk, step: int, shards: Sequence[TensorShard], state: dict, group: Group) -> str:
    """Save the checkpoint of `step`; return the name of its folder, like `step-00000100`. Collective.

    A crash at any moment leaves all of this checkpoint or nothing of it, and every earlier one as it was: everything is
    written and synced in `step-00000100.partial`, the index last, and then that folder is renamed. Each rank writes the
    shards that it saves to its own file, `rank-00000.safetensors`. Rank 0 writes `index.json`: a line with the SHA-256
    of the rest, and a JSON object

        {"state": state, "files": {file: SHA-256}, "tensors": {name: {"dtype": "float32", "shape": [6, 4],
         "boxes": [{"start": [0, 0], "stop": [3, 4], "file": "rank-00000.safetensors", "key": key in the file}]}}}

    shards: of this rank; over all ranks, those with `is_saved_here` cover every element once. state: a JSON object, of
    which that of rank 0 is saved. Raises CollectiveError on all ranks if any of them failed; then nothing is saved.
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


def read_index(disk: Disk, folder: str) -> dict:
    """Return the index of a checkpoint: the JSON object that `save` describes. Raises DamagedError."""
    try:
        digest, body = disk.read(f"{folder}/index.json").split(b"\n", 1)
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder}/index.json cannot be read: {error}") from error
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedError(f"{folder}/index.json is damaged")
    return json.loads(body)


def load(disk: Disk, folder: str, shards: Sequence[TensorShard], group: Group) -> dict:
    """Fill the tensors of `shards` from a checkpoint that any layout has saved; return its state. Collective.

    folder: as `save` returned it. shards: of this rank; their tensors are overwritten in place. A rank reads only the
    files that hold a box which overlaps one of its shards. No rank writes to a tensor before all ranks know that every
    file they need has its SHA-256, and that every element of every shard is in the checkpoint. Raises CollectiveError
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
                values = files[file][entry["key"]][overlap.within(box)]
                copies.append((shard.tensor.detach()[overlap.within(shard.box)], values))
                found += overlap.numel
            if found != shard.box.numel:
                raise UserError(f"{folder} has {found} of the {shard.box.numel} elements of {shard_key(shard)}")
        return index["state"]

    states = run_on_all_ranks(bind_all_gather_object(group), plan)
    for target, values in copies:
        target.copy_(values)
    return states[group.rank]


def read_tensors(disk: Disk, file: str, digest: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint's file by key, if it has this SHA-256. Raises DamagedError otherwise."""
    try:
        data = disk.read(file)
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise DamagedError(f"{file} is damaged")
    return tensors_from_bytes(data)


def run_shards(run: Run, is_saved_here: bool) -> list[TensorShard]:
    """Return the tensors of a run as shards that are full tensors: parameters, buffers and optimizer states.

    Their names are `params/NAME`, `buffers/NAME` and `optimizer.KEY/NAME`, with the NAME of the parameter or buffer and
    the KEY of the state: `optimizer.exp_avg/layer.weight`.
    """
    tensors = {f"params/{name}": parameter for name, parameter in run.model.named_parameters()}
    tensors |= {f"buffers/{name}": buffer for name, buffer in run.model.named_buffers()}
    for name, parameter in run.model.named_parameters():
        states = run.optimizer.state.get(parameter, {})
        tensors |= {f"optimizer.{key}/{name}": value for key, value in states.items()}
    return [TensorShard(n, t.shape, Box.whole(tuple(t.shape)), t, is_saved_here) for n, t in tensors.items()]


def run_state(run: Run) -> dict:
    """Return the state of a run that is not in its tensors, as a JSON object: step, position, seed, loss scale."""
    scaler = None if run.scaler is None else run.scaler.state_dict()
    return {"step": run.step, "position": run.position, "seed": run.seed, "scaler": scaler}


def set_run_state(run: Run, state: dict) -> None:
    """Set the state that `run_state` returned."""
    run.step, run.position, run.seed = state["step"], state["position"], state["seed"]
    if run.scaler is not None:
        run.scaler.load_state_dict(state["scaler"])


def create_optimizer_states(run: Run, tensors: Mapping[str, tuple[Sequence[int], str]]) -> None:
    """Create the optimizer states among `tensors` as zeros, and delete all others: a new optimizer has none yet.

    tensors: shape and dtype name of each tensor of the run, by the names of `run_shards`.
    """
    parameters = dict(run.model.named_parameters())
    run.optimizer.state.clear()
    for stored, (shape, dtype) in tensors.items():
        kind, name = stored.split("/", 1)
        if kind.startswith("optimizer."):
            key = kind.removeprefix("optimizer.")
            run.optimizer.state[parameters[name]][key] = torch.zeros(shape, dtype=DTYPES[dtype])


def resume(run: Run, disk: Disk, group: Group) -> bool:
    """Continue from the newest intact checkpoint: from then on the run is the one that was saved. Collective.

    Parameters, buffers, optimizer states, step, position, seed and loss scale all become those of the checkpoint. A
    damaged checkpoint is renamed to `.damaged`, and the one before it is tried. Returns whether there was one.
    """
    folders = all_gather_object([name for name in disk.names() if _COMPLETE.fullmatch(name)], group)[0]
    for folder in reversed(folders):
        try:
            [index, *_] = run_on_all_ranks(bind_all_gather_object(group), lambda at=folder: read_index(disk, at))
            create_optimizer_states(run, {name: (t["shape"], t["dtype"]) for name, t in index["tensors"].items()})
            set_run_state(run, load(disk, folder, run_shards(run, False), group))
            return True
        except CollectiveError as failure:
            run.optimizer.state.clear()
            if not failure.found_damage:
                raise
            warnings.warn(f"{folder} is not used: {failure}", stacklevel=2)
            if group.rank == 0:
                disk.rename(folder, f"{folder}.damaged")
    return False


def samples_at(seed: int, position: int, count: int, num_samples: int) -> list[int]:
    """Return the numbers of the next `count` samples of a run at `position`: each epoch is a new permutation."""
    epochs = range(position // num_samples, (position + count - 1) // num_samples + 1)
    seeds = [int(hash64(seed, epoch)) >> 1 for epoch in epochs]
    order = torch.cat([torch.randperm(num_samples, generator=torch.Generator().manual_seed(s)) for s in seeds])
    start = position - epochs[0] * num_samples
    return order[start : start + count].tolist()


def agreed_update(run: Run, gradients: Sequence[Tensor], is_usable: bool, group: Group) -> bool:
    """Sum the gradients over the ranks, then update the parameters on all ranks or on none. Collective.

    gradients: one per parameter, in the order of the model: this rank's part of the gradient of the global batch, times
    the loss scale. is_usable: False if this rank could not compute them; their values then do not matter.
    The ranks do not update if any of them says so, or any element of the sum is non-finite. If the gradients of all
    ranks were usable, the scaler learns whether they overflowed. One all-reduce, in the gradients' dtype, decides all.
    Returns whether the ranks updated. Raises CommError if a rank is gone; then nothing of `run` has changed.
    """
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), gradients[0].new_tensor([not is_usable])])
    all_reduce(flat, group)
    usable, finite = flat[-1].item() == 0, bool(flat.isfinite().all())
    scale = 1.0 if run.scaler is None else run.scaler.scale
    if run.scaler is not None and usable:
        run.scaler.update(not finite)
    if usable and finite:
        sums = (flat[:-1] / scale).split([gradient.numel() for gradient in gradients])
        for parameter, total in zip(run.model.parameters(), sums, strict=True):
            parameter.grad = total.view_as(parameter)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return usable and finite


def train_step(run: Run, group: Group) -> bool:
    """Run one step on this rank's share of the global batch; return whether the parameters were updated. Collective.

    The global batch, its dropout masks and its gradient do not depend on the number of ranks, so that a step that was
    aborted can be repeated by fewer. Raises CommError if a rank is gone; then the step can be repeated.
    """
    samples, is_usable = samples_at(run.seed, run.position, run.batch_size, run.num_samples), True
    parameters, scale = list(run.model.parameters()), 1.0 if run.scaler is None else run.scaler.scale
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    try:
        for sample in samples[group.rank :: group.size]:
            torch.manual_seed(int(hash64(run.seed, run.step, sample)) >> 1)  # of dropout
            loss = run.sample_loss(sample) * (scale / run.batch_size)
            for total, gradient in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
                total += gradient
    except (OSError, ValueError) as error:  # this rank cannot read its data; the others must not update without it
        warnings.warn(f"rank {group.rank} has no gradient in step {run.step}: {error}", stacklevel=2)
        is_usable = False
    for options in run.optimizer.param_groups:
        options["lr"] = run.learning_rate(run.step)
    updated = agreed_update(run, gradients, is_usable, group)
    run.step, run.position = run.step + 1, run.position + run.batch_size
    return updated


def recover(run: Run, group: Group | None, rendezvous: Callable[[Group | None], Group]) -> Group:
    """Form a group of all living ranks and give all of them the state of the most advanced; return the group.

    Called by every survivor after a CommError, and by a new rank that joins, with group None. A survivor that has made
    the update of the aborted step is one step ahead of one that has not: the state of the former is sent to all ranks.
    rendezvous: closes the connections of the group that it is given, so that a rank which still waits for this one gets
    a CommError too; waits until all living ranks have called it; returns a group of them.
    """
    group = rendezvous(group)
    own = [(shard.name, (shard.shape, shard.dtype_name)) for shard in run_shards(run, False)]
    states = all_gather_object((run.step, run_state(run), own), group)
    source = max(range(group.size), key=lambda rank: states[rank][0])  # the first of the most advanced ranks
    _, state, tensors = states[source]
    if group.rank != source:
        create_optimizer_states(run, dict(tensors))
        set_run_state(run, state)
    received = {shard.name: shard.tensor.detach() for shard in run_shards(run, False)}
    for name, _ in tensors:
        broadcast(received[name], source, group)
    return group


def train(
    run: Run, disk: Disk, rendezvous: Callable[[Group | None], Group], steps: int, save_every: int, join: bool = False
) -> Group:
    """Train until `steps` steps are complete, whatever ranks die meanwhile; return the last group. Collective.

    disk, rendezvous: as for `save` and `recover`. save_every: steps between two checkpoints, after which new ranks are
    admitted. join: whether this rank joins a run of other ranks; otherwise the run resumes from `disk`, or begins.
    """
    group = recover(run, None, rendezvous)
    if not join:
        resume(run, disk, group)
    while run.step < steps:
        try:
            train_step(run, group)
            if must_regroup := run.step % save_every == 0:
                save(disk, run.step, run_shards(run, group.rank == 0), run_state(run), group)
        except CollectiveError as failure:  # such as a full disk: the earlier checkpoints are still there
            warnings.warn(f"step {run.step} was not saved: {failure}", stacklevel=2)
        except CommError:
            must_regroup = True
        if must_regroup:  # not in `except`, where the error's traceback would keep the connections of `group` open
            group = recover(run, group, rendezvous)
    return group


def differing_replicas(tensors: Mapping[str, Tensor], group: Group) -> dict[str, list[int]]:
    """Return which ranks differ from the others, and in which tensors: {name: ranks}, {} if all are equal. Collective.

    tensors: of this rank, with the same names, shapes and dtypes on all ranks. Tensors are compared bit by bit, by 8
    bytes of their SHA-256. A rank differs if more than half of the ranks have another value, equal among themselves;
    if no value has such a majority, all ranks are named.
    """
    contents = [tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
    digests = [hashlib.sha256(content).digest() for content in contents]
    mine = torch.tensor([int.from_bytes(digest[:8], "little", signed=True) for digest in digests])
    table = torch.empty(group.size * len(mine), dtype=torch.int64)
    all_gather(table, mine, group)
    found = {}
    for name, column in zip(tensors, table.view(group.size, -1).T.tolist(), strict=True):
        [(value, votes)] = Counter(column).most_common(1)
        if votes < group.size:
            has_majority = 2 * votes > group.size
            found[name] = [rank for rank, each in enumerate(column) if each != value or not has_majority]
    return found


def expected_time_s(interval_s: float, mtbf_s: float, save_s: float, restart_s: float) -> float:
    """Return the expected time until `interval_s` seconds of work are done and saved, failures included.

    Failures are a Poisson process, with mtbf_s seconds between two on average. save_s: of one save. restart_s: from a
    failure until the work since the last save begins anew. Failures also occur while saving and restarting.
    """
    # Daly 2006, equation 13: M exp(R / M) (exp((tau + D) / M) - 1).
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)


def best_interval_s(mtbf_s: float, save_s: float, restart_s: float = 0.0) -> float:
    """Return the seconds of work between two saves for which the expected time per second of work is smallest.

    Arguments as for `expected_time_s`.
    """
    # The cost has one minimum, between 0 and mtbf_s. A ternary search: it is not beyond the worse one of two points.
    low, high = 0.0, mtbf_s
    for _ in range(100):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        costs = [expected_time_s(at, mtbf_s, save_s, restart_s) / at for at in (left, right)]
        low, high = (low, right) if costs[0] < costs[1] else (left, high)
    return (low + high) / 2
