"""Data parallelism: each rank has the whole model and its own samples, and the ranks sum their gradients.

`NaiveReducer` all-reduces every gradient after backward. `BucketedReducer` gathers gradients in flat buckets and
all-reduces each bucket as soon as it is complete, while backward still runs (Li et al. 2020, arXiv 2006.15704).
Both have the interface of every gradient reducer of this package:

    clear()               before a step: forget the last step's gradients
    add(name, gradient)   from backward: add one micro-batch's local gradient of a parameter
    end_micro_batch()     after the backward of each micro-batch
    finish()              after backward: complete the sums over the ranks, and give them to the masters
    update_parameters()   after the optimizer: bring the masters' new values into the parameters
    gather_root(), free_root()  around forward: the parameters outside of all layers, which ZeRO 3 shards, too
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_reduce, broadcast
from minidist.simple.mixed_precision import copy_to_parameters

Tensors = Mapping[str, Tensor]  # by the names of parameters


def broadcast_model(model: nn.Module, group: Group) -> None:
    """Collective: overwrite all parameters and buffers with those of group rank 0, so that the replicas start equal."""
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast(tensor.data, 0, group)


def count_tokens(num_tokens: Sequence[int], weight: float, group: Group) -> float:
    """Collective: return the weighted number of tokens of the global batch, by which every loss sum is divided.

    num_tokens: the tokens with a loss in each of this rank's micro-batches. weight: w_i, the factor with which the loss
    of this rank's data counts. group: the ranks that process different tokens.
    """
    count = torch.tensor([sum(num_tokens) * weight], dtype=torch.float64, device=group.world.control_device)
    all_reduce(count, group)
    return count.item()


def register_gradient_hooks(parameters: Mapping[str, nn.Parameter], add: Callable[[str, Tensor], None]) -> None:
    """Call `add(name, gradient)` inside backward, as soon as a parameter's gradient is complete. `.grad` stays None."""

    def take_gradient(name: str, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        add(name, gradient)

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(partial(take_gradient, name))


class NaiveReducer:
    """Gradient reducer with one all-reduce per parameter, after backward; all others inherit its interface.

    parameters: what the model computes with, by name. masters: what the optimizer updates, by name: the parameters
    themselves, or wider copies of them (`mixed_precision.make_masters`); gradients are summed in their dtype. group:
    the ranks that have the same parameters and different tokens. num_micro_batches: how many gradients of each
    parameter come in a step.

    sums: for each master, the tensor that becomes its `.grad`. num_added: for each parameter, the number of gradients
    that this rank has added in this step.
    """

    def __init__(self, parameters: Tensors, masters: Tensors, group: Group, num_micro_batches: int = 1):
        self.parameters, self.masters, self.group = dict(parameters), dict(masters), group
        self.num_micro_batches = num_micro_batches
        self.sums = self.allocate_sums()
        self.clear()

    def allocate_sums(self) -> dict[str, Tensor]:
        """Return a tensor for the sum of each parameter's gradients, by name, in the parameter's shape."""
        return {name: torch.zeros_like(self.masters[name]) for name in self.parameters}

    def clear(self) -> None:
        """Forget all gradients; call it before every step."""
        self.num_added = dict.fromkeys(self.parameters, 0)
        for name, total in self.sums.items():
            total.zero_()
            self.masters[name].grad = None

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the local gradient of one micro-batch to the sum of parameter `name`."""
        self.sums[name] += gradient
        self.num_added[name] += 1

    def finish(self) -> None:
        """Collective: complete the sums; set each master's `.grad`, to None if no rank used the parameter."""
        self.reduce_sums()
        used = [float(count > 0) for count in self.num_added.values()]
        num_ranks = torch.tensor(used, device=self.group.world.device)
        all_reduce(num_ranks, self.group)
        for name, uses in zip(self.num_added, num_ranks.tolist(), strict=True):
            if name in self.masters:
                self.masters[name].grad = self.sums[name] if uses else None

    def reduce_sums(self) -> None:
        """Collective: sum over the ranks all gradients that are not yet summed. A rank without data sends zeros."""
        for total in self.sums.values():
            all_reduce(total, self.group)

    def update_parameters(self) -> None:
        """Copy the masters to the parameters, which rounds them to the parameters' dtype."""
        copy_to_parameters(self.masters, self.parameters)

    def gather_root(self) -> None:
        """Called before the first forward of a step or an evaluation. Nothing to do here: ZeRO 3 gathers parameters."""

    def end_micro_batch(self) -> None:
        """Called after the backward of every micro-batch. Nothing to do here: ZeRO 2 and 3 reduce gradients."""

    def free_root(self) -> None:
        """Called after an evaluation. Nothing to do here: ZeRO 3 frees the parameters that are still gathered."""


def assign_buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Assign gradients to buckets; return the names in each bucket, in the order of `sizes`. No bucket is empty.

    A bucket takes the next gradient if it fits; one larger than `limit` has a bucket of its own. sizes: bytes of each
    gradient by name, in the order in which backward computes them. limit: maximum bytes of a bucket.
    """
    buckets: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets


class BucketedReducer(NaiveReducer):
    """Gradient reducer that all-reduces flat buckets of several gradients, each while backward computes the next ones.

    bucket_bytes: maximum size of a bucket. buckets: the names in each, and its flat tensor, (numel of its gradients,).
    handles: of the all-reduces in flight, which are those of the first buckets.
    """

    def __init__(self, *args, bucket_bytes: int = 25 << 20, **options):
        self.bucket_bytes = bucket_bytes
        super().__init__(*args, **options)

    def allocate_sums(self) -> dict[str, Tensor]:
        """Allocate the buckets; return each parameter's view of its bucket, by name, in the parameter's shape."""
        self.buckets: list[tuple[list[str], Tensor]] = []
        self.handles: list[Handle] = []
        sums = {}
        # Backward computes gradients in about the reverse order of the model.
        sizes = {name: self.masters[name].nbytes for name in reversed(self.parameters)}
        for names in assign_buckets(sizes, self.bucket_bytes):
            masters = [self.masters[name] for name in names]
            numels = [master.numel() for master in masters]
            flat = masters[0].new_zeros(sum(numels))
            self.buckets.append((names, flat))
            for name, master, part in zip(names, masters, flat.split(numels), strict=True):
                sums[name] = part.view(master.shape)
        return sums

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a local gradient; then start the all-reduces of all buckets that are complete, in their order.

        None is launched before those ahead of it. If ranks completed their buckets in different orders and launched
        them as they come, two ranks would wait for different buckets.
        """
        super().add(name, gradient)
        for names, flat in self.buckets[len(self.handles) :]:
            if any(self.num_added[each] < self.num_micro_batches for each in names):
                break
            self.handles.append(all_reduce(flat, self.group, async_op=True))

    def reduce_sums(self) -> None:
        """Collective: start the remaining all-reduces, and wait for all of them."""
        self.handles += [all_reduce(flat, self.group, async_op=True) for _, flat in self.buckets[len(self.handles) :]]
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
