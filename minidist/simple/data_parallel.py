"""Data parallelism: each rank has the whole model and its own samples, and the ranks sum their gradients.

`NaiveReducer` all-reduces every gradient after backward. `BucketedReducer` gathers gradients in flat buckets and
all-reduces each bucket as soon as it is complete, while backward still runs (Li et al. 2020, arXiv 2006.15704).
Both have the interface of every gradient reducer of this package:

    clear()               before a step: forget the last step's gradients
    add(name, gradient)   from backward: add one micro-batch's local gradient of a parameter
    finish()              after backward: complete the sums over the ranks, and give them to the masters
    update_parameters()   after the optimizer: bring the masters' new values into the parameters
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_reduce, broadcast

Tensors = Mapping[str, Tensor]  # by the names of parameters


def broadcast_model(model: nn.Module, group: Group) -> None:
    """Collective: overwrite all parameters and buffers with those of group rank 0, so that the replicas start equal."""
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast(tensor.data, 0, group)


def count_tokens(num_tokens: Sequence[int], weight: float, group: Group) -> float:
    """Collective: return the weighted number of tokens of the global batch, by which every loss sum is divided.

    num_tokens: the tokens with a loss in each of this rank's micro-batches. weight: w_i, of this rank's data. group:
    the ranks that process different tokens. A mean of the ranks' means would give the tokens of a short batch more
    weight.
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
    parameter come in a step. all_reduce: sums a gradient over the ranks, called as `all_reduce(tensor, group)`.

    sums: for each master, the tensor that becomes its `.grad`. num_added: for each parameter, the number of gradients
    that this rank has added in this step.
    """

    def __init__(
        self, parameters: Tensors, masters: Tensors, group: Group, num_micro_batches: int = 1, all_reduce=all_reduce
    ):
        self.parameters, self.masters, self.group = dict(parameters), dict(masters), group
        self.num_micro_batches, self.all_reduce = num_micro_batches, all_reduce
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
        """Collective: sum over the ranks what is not yet summed. Every rank takes part, one without data with zeros."""
        for total in self.sums.values():
            self.all_reduce(total, self.group)

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Copy the masters to the parameters, which rounds them to the parameters' dtype."""
        for name, parameter in self.parameters.items():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])

    def gather_root(self) -> None:
        """Called before the first forward of a step or an evaluation: all parameters are here already (see `zero`)."""

    def end_micro_batch(self) -> None:
        """Called after the backward of every micro-batch: nothing to do here; ZeRO 2 and 3 reduce."""

    def free_root(self) -> None:
        """Called after an evaluation: parameters are kept (see `zero`)."""


class BucketedReducer(NaiveReducer):
    """Gradient reducer that all-reduces flat buckets of several gradients, each while backward computes the next ones.

    bucket_bytes: a bucket is closed before it would exceed this size; a larger parameter has a bucket of its own.
    """

    def __init__(self, *args, bucket_bytes: int = 25 << 20, **options):
        self.bucket_bytes = bucket_bytes
        super().__init__(*args, **options)

    def allocate_sums(self) -> dict[str, Tensor]:
        """Allocate the buckets; return each parameter's view of its bucket, by name, in the parameter's shape."""
        self.buckets: list[tuple[list[str], Tensor]] = []  # names and flat tensor
        self.handles: list[Handle] = []  # of the all-reduces in flight: of the first buckets
        sums = {}
        for names in self.assign_buckets():
            masters = [self.masters[name] for name in names]
            sizes = [master.numel() for master in masters]
            flat = masters[0].new_zeros(sum(sizes))
            self.buckets.append((names, flat))
            for name, master, part in zip(names, masters, flat.split(sizes), strict=True):
                sums[name] = part.view(master.shape)
        return sums

    def assign_buckets(self) -> list[list[str]]:
        """Return the names in each bucket. Backward computes gradients in about the reverse order of the model."""
        buckets: list[list[str]] = [[]]
        for name in reversed(self.parameters):
            filled = sum(self.masters[each].nbytes for each in buckets[-1])
            if buckets[-1] and filled + self.masters[name].nbytes > self.bucket_bytes:
                buckets.append([])
            buckets[-1].append(name)
        return buckets

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a local gradient; then start the all-reduces of all buckets that are complete, in their order.

        A rank may complete its buckets in another order than its peers. So none is launched before those ahead of it:
        all ranks launch all buckets in the same order, or two of them would wait for different buckets.
        """
        super().add(name, gradient)
        for names, flat in self.buckets[len(self.handles) :]:
            if any(self.num_added[each] < self.num_micro_batches for each in names):
                break
            self.handles.append(all_reduce(flat, self.group, async_op=True))

    def reduce_sums(self) -> None:
        """Collective: start the remaining all-reduces, and wait for all of them."""
        for _, flat in self.buckets[len(self.handles) :]:
            self.handles.append(all_reduce(flat, self.group, async_op=True))
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
