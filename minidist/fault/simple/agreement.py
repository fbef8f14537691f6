"""One training step that all ranks make or none, and a comparison of their replicas (7.5, 7.6).

Restrictions: data parallelism only, and one sample per micro-batch. The fast version is `minidist.train.step_result`;
the option `fault.digest_every` compares digests.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minidist.comm import Group, all_gather, all_reduce
from minidist.fault.simple.run import Run, samples_at
from minidist.hashing import hash64


def local_gradients(run: Run, group: Group) -> list[Tensor]:
    """Return this rank's part of the gradient of the global batch, one tensor per parameter, times the loss scale.

    The parts of all ranks of `group` sum to the gradient of the mean loss over the global batch of the next step. That
    gradient does not depend on the number of ranks, nor do the samples and their dropout masks, so the remaining ranks
    can repeat an aborted step. Raises what `run.sample_loss` raises.
    """
    samples = samples_at(run.seed, run.position, run.batch_size, run.num_samples)
    parameters, scale = list(run.model.parameters()), 1.0 if run.scaler is None else run.scaler.scale
    totals = [torch.zeros_like(parameter) for parameter in parameters]
    for sample in samples[group.rank :: group.size]:
        torch.manual_seed(int(hash64(run.seed, run.step, sample)) >> 1)  # of dropout
        loss = run.sample_loss(sample) * (scale / run.batch_size)
        for total, gradient in zip(totals, torch.autograd.grad(loss, parameters), strict=True):
            total += gradient
    return totals


def agreed_update(run: Run, gradients: Sequence[Tensor], is_usable: bool, group: Group) -> bool:
    """Collective: sum the gradients over the ranks, then update the parameters on all ranks or on none.

    gradients: one per parameter, in the order of the model: this rank's part of the gradient of the global batch, times
    the loss scale. is_usable: False if this rank could not compute them; their values then do not matter.
    No rank updates if `is_usable` is False on any of them, or any element of the sum is non-finite. If the gradients of
    all ranks were usable, the scaler learns whether they overflowed. One all-reduce, in the gradients' dtype, decides
    all. Returns whether the ranks updated. Raises CommError if a rank is gone; then nothing of `run` has changed.
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
    """Collective: run one step on this rank's part of the global batch; return whether the parameters were updated.

    Raises CommError if a rank is gone; then the step can be repeated.
    """
    try:
        gradients, is_usable = local_gradients(run, group), True
    except (OSError, ValueError) as error:  # this rank cannot read its data; the others must not update without it
        warnings.warn(f"rank {group.rank} has no gradient in step {run.step}: {error}", stacklevel=2)
        gradients, is_usable = [torch.zeros_like(parameter) for parameter in run.model.parameters()], False
    for options in run.optimizer.param_groups:
        options["lr"] = run.learning_rate(run.step)
    updated = agreed_update(run, gradients, is_usable, group)
    run.step, run.position = run.step + 1, run.position + run.batch_size
    return updated


def differing_replicas(tensors: Mapping[str, Tensor], group: Group) -> dict[str, list[int]]:
    """Collective: return which ranks differ from the others, and in which tensors: {name: ranks}, {} if all are equal.

    tensors: this rank's tensors, with the same names, shapes and dtypes on all ranks. Tensors are compared bit by bit,
    by 8 bytes of their SHA-256. A rank differs if more than half of the ranks have another value, equal among
    themselves; if no value has such a majority, all ranks are named.
    """
    contents = [tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
    digests = [hashlib.sha256(content).digest() for content in contents]
    mine = torch.tensor([int.from_bytes(digest[:8], "little", signed=True) for digest in digests], dtype=torch.int64)
    table = torch.empty(group.size * len(mine), dtype=torch.int64)
    all_gather(table, mine, group)
    found = {}
    for name, column in zip(tensors, table.view(group.size, -1).T.tolist(), strict=True):
        [(value, votes)] = Counter(column).most_common(1)
        if votes < group.size:
            has_majority = 2 * votes > group.size
            found[name] = [rank for rank, each in enumerate(column) if each != value or not has_majority]
    return found
