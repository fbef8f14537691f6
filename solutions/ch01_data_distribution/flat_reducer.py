"""One all-reduce of a flat buffer: the solution, as it stands in minidist.parallel.data.simple.

The buffer costs no extra memory: the gradients are stored in it, and `.grad` is a view. The naive reducer sends two
messages per parameter, this one sends one in all, and the numbers of uses travel in the same message. The values are
the same, bit for bit, if the all-reduce adds the ranks in the same order.

Its weakness: the only message can start when the last gradient is there, so communication and backward never overlap.

Usual wrong answers:
* the package's own
* sets all gradients to ones
* clears the gradients at the end of finish_reductions(), so those of an aborted step remain
* takes two groups of equally many ranks for the same group
* a rank that used no parameter does not take part in the all-reduce
* allocates the buffer in torch's default dtype
* never empties the buffer: a step begins with the sums of the one before
* all-reduces the buffer as soon as a parameter is ready, and again at the end
* launches the buffer when all its parameters are ready, during backward
* divides by the number of ranks, although every loss is already divided
* puts all gradients into one buffer, which the group of the last parameter sums
* fills a flat buffer, and all-reduces each parameter's part of it separately
* concatenates the gradients in the order in which this rank computed them, which differs by rank
* a rank decides alone whether a parameter was used
* a parameter that no rank used gets a gradient of zeros
* leaves the unused parameters of this rank out of the buffer, so that buffers differ in size
* counts uses by the sum of the gradient, which is NaN or 0 for some
* sets all gradients to zeros
* takes a gradient of zeros for an unused parameter
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minidist.comm import Group, Handle, all_reduce
from minidist.parallel.data.simple import NaiveReducer


@dataclass(eq=False)
class FlatBuffer:
    """The gradients of some parameters in one tensor, which one all-reduce over `group` sums.

    names: of the parameters. tensor: (numel + number of names,): the gradients, then one element per parameter: 1 if
    this rank used it, so after the all-reduce the number of ranks that used it. handle: None unless in flight.
    """

    names: list[str]
    tensor: Tensor
    group: Group
    handle: Handle | None = None

    def launch(self, used: set[str]) -> None:
        """Collective: start the all-reduce. used: names of the parameters that this rank has used."""
        self.tensor[-len(self.names) :] = torch.tensor([float(name in used) for name in self.names])
        self.handle = all_reduce(self.tensor, self.group, async_op=True)


class FlatReducer(NaiveReducer):
    """Gradient reducer of data parallelism with one flat buffer for each process group, all-reduced after backward."""

    def assign_names(self) -> list[list[str]]:
        """Return the parameter names of each flat buffer: in backward order, all of one process group together."""
        names = list(reversed(self._parameters))
        groups = dict.fromkeys(self._groups[name] for name in names)
        return [[name for name in names if self._groups[name] is group] for group in groups]

    def allocate_sums(self) -> dict[str, Tensor]:
        """Allocate the flat buffers; return each parameter's part of its buffer, by name, in the parameter's shape."""
        self._buffers, sums = list[FlatBuffer](), {}
        for names in self.assign_names():
            sizes = [self._parameters[name].numel() for name in names]
            tensor = self._parameters[names[0]].new_zeros(sum(sizes) + len(names))
            for name, part in zip(names, tensor.split([*sizes, len(names)])[:-1], strict=True):
                sums[name] = part.view(self._parameters[name].shape)
            self._buffers.append(FlatBuffer(names, tensor, self._groups[names[0]]))
        return sums

    def finish_reductions(self) -> None:
        """Collective: all-reduce the flat buffers, and set `.grad`."""
        for buffer in self._buffers:  # all of them before the first wait
            buffer.launch(self._used)
        self.wait_and_set_grads()

    def wait_and_set_grads(self) -> None:
        """Wait for the all-reduces of all buffers; set `.grad` to the sums, to None if no rank used the parameter."""
        for buffer in self._buffers:  # the host reads the numbers of uses, so it must wait too
            buffer.handle.wait(host=True)
            buffer.handle = None
            for name, uses in zip(buffer.names, buffer.tensor[-len(buffer.names) :].tolist(), strict=True):
                self._parameters[name].grad = self._sums[name] if uses else None
