"""One all-reduce of a flat buffer.

Every message has a fixed cost, so one large message is faster than many small ones. Write a gradient reducer that keeps
all gradients in one flat buffer, and all-reduces this buffer once after backward.

FlatReducer inherits from NaiveReducer, the solution of gradient_sum: its __init__ sets self._parameters and
self._groups, by name, and self._sums to the result of your allocate_sums(), one tensor per parameter; its accumulate()
adds gradients to these tensors, in place, and names in the set self._used. They must be views of the flat buffer.
Example with 2 ranks and parameters w of shape (2,), b of shape (1,) and c of shape (1,), in that order:
    names      ["c", "b", "w"]: the reverse order of the parameters, in which backward computes gradients
    the buffer  c   b   w1   w2   and whether this rank used c, b, w
    rank 0     [0., 0., 11., 22., 0., 0., 1.]
    rank 1     [0., 3.,  5.,  5., 0., 1., 1.]
    the sum    [0., 3., 16., 27., 0., 1., 2.]: w.grad is [16., 27.], b.grad is [3.], and c.grad is None
Parameters that other groups of ranks sum need another buffer; in this chapter one group sums all.

Checked: everything that gradient_sum checks; one message for all gradients, after backward, and at most 16 bytes per
parameter beside them; ranks that compute the gradients in different orders; gradients of zeros; and on 4 ranks a model
of which another group sums some gradients.

You may call:
    tensor.new_zeros(n)   n zeros in the dtype and on the device of `tensor`; Tensor.numel()
    tensor.split([2, 1, 3])   views of 2, 1 and 3 consecutive elements; Tensor.view(shape): also a view
    all_reduce(tensor, group, async_op=True)   starts the sum in place and returns a Handle
    handle.wait(host=True)   returns when the sum is there; host=True: also if the tensor is on a GPU
    Tensor.tolist(), torch.tensor(list of numbers), zip, dict.fromkeys(names)   which keeps the order

Check it with: python -m exercises check flat_reducer

Stub 44f26d4f.
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
        raise NotImplementedError("write which parameters this rank used, and start the all-reduce")


class FlatReducer(NaiveReducer):
    """Gradient reducer of data parallelism with one flat buffer for each process group, all-reduced after backward."""

    def assign_names(self) -> list[list[str]]:
        """Return the parameter names of each flat buffer: in backward order, all of one process group together."""
        raise NotImplementedError("return the names of each buffer")

    def allocate_sums(self) -> dict[str, Tensor]:
        """Allocate the flat buffers; return each parameter's part of its buffer, by name, in the parameter's shape."""
        raise NotImplementedError("allocate the buffers; return the views by name")

    def finish_reductions(self) -> None:
        """Collective: all-reduce the flat buffers, and set `.grad`."""
        raise NotImplementedError("all-reduce every buffer, and set .grad")

    def wait_and_set_grads(self) -> None:
        """Wait for the all-reduces of all buffers; set `.grad` to the sums, to None if no rank used the parameter."""
        raise NotImplementedError("wait for every buffer; set .grad to the sum, or to None")
