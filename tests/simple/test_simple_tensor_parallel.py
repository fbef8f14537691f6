"""The operator that has no place in the trainer's own step: all-gather in forward, slice in backward."""

import pytest
import torch

from minidist.comm import bind
from minidist.comm.group_specs import GroupSpec
from minidist.mesh import Mesh
from minidist.simple.tensor_parallel import gather_features


def gather_on_ranks(world):
    """Gather each rank's columns of a matrix; every rank then computes the same weighted sum of squares."""
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tensor", ("tp",))])["tensor"]
    full = torch.arange(24.0, dtype=torch.float64).view(2, 12) / 7
    own = full.chunk(world.size, 1)[world.rank].clone().requires_grad_()
    gathered = gather_features(own, group)
    weights = torch.arange(24.0, dtype=torch.float64).view(2, 12)
    (gathered.square() * weights).sum().backward()
    expected = (2 * full * weights).chunk(world.size, 1)[world.rank]
    return torch.equal(gathered, full), torch.equal(own.grad, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathered_features_pass_each_rank_its_slice_of_the_gradient(ranks, size):
    assert ranks(gather_on_ranks, size) == [(True, True)] * size
