"""Data parallelism: every rank holds the whole model, sees its part of the batch, and takes the same step.

The replicas are equal at the start because one of them is broadcast, and stay equal because the same gradient goes into
the same update on each. Only gradients are sent between the ranks, never parameters.
"""

from collections.abc import Collection, Mapping
from typing import Literal

from torch import nn

from minidist.comm import Group, broadcast
from minidist.parallel.data.buckets import MIB, BucketedReducer
from minidist.parallel.data.naive import NaiveReducer
from minidist.parallel.data.reducer import GradientReducer
from minidist.parameters import ParamSpecs


def broadcast_model(model: nn.Module, group: Group) -> None:
    """Collective: overwrite all parameters and buffers of `model` with those of the group's first rank.

    All broadcasts are launched before the first wait; a tied tensor is sent once.
    """
    tensors = [*model.parameters(), *model.buffers()]
    handles = [broadcast(tensor.data, 0, group, async_op=True) for tensor in tensors if tensor.is_contiguous()]
    for handle in handles:
        handle.wait()
    for tensor in tensors:
        if not tensor.is_contiguous():  # a collective needs contiguous memory
            whole = tensor.data.contiguous()
            broadcast(whole, 0, group)
            tensor.data.copy_(whole)


def make_reducer(
    kind: Literal["bucketed", "naive"],
    parameters: Mapping[str, nn.Parameter],
    specs: ParamSpecs,
    groups: Collection[Group],
    bucket_mib: float = 25.0,
) -> GradientReducer:
    """Make the gradient reducer that sums gradients over the replicas of each parameter.

    kind: `BucketedReducer` or `NaiveReducer`. specs: the parameters' specs, by name. groups: these must include the
    group of each parameter's replicas. bucket_mib: maximum bucket size in MiB, for "bucketed".
    """
    if kind == "naive":
        return NaiveReducer(parameters, specs, groups)
    return BucketedReducer(parameters, specs, groups, int(bucket_mib * MIB))
