"""The simple collectives give what torch computes in one process, for any number of ranks, any size and reduction."""

import pytest
import torch

from minidist.comm import bind
from minidist.mesh import Mesh
from minidist.simple import collectives

SIZES = (0, 1, 2, 5, 12, 37)
REDUCTIONS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}


def inputs(num_ranks: int, size: int) -> torch.Tensor:
    """Whole numbers, so that every order of additions gives the same: (ranks, size)."""
    return torch.randint(1, 5, (num_ranks, size), generator=torch.Generator().manual_seed(size)).double()


def run_all(world):
    group = bind(world, Mesh(dp=world.size))["control"]
    found = {}
    for size in SIZES:
        for op in REDUCTIONS:
            for name in ("ring_all_reduce", "halving_doubling_all_reduce"):
                tensor = inputs(world.size, size)[world.rank].clone()
                getattr(collectives, name)(tensor, group, op)
                found[name, size, op] = tensor
            for root in range(world.size):
                tensor = inputs(world.size, size)[world.rank].clone()
                collectives.tree_reduce(tensor, root, group, op)
                found["tree_reduce", size, op, root] = tensor
        for root in range(world.size):
            tensor = inputs(world.size, size)[world.rank].clone()
            collectives.tree_broadcast(tensor, root, group)
            found["tree_broadcast", size, root] = tensor
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7])
def test_collectives_give_what_one_process_computes(ranks, num_ranks):
    for rank, found in enumerate(ranks(run_all, num_ranks)):
        for (name, size, *rest), tensor in found.items():
            given = inputs(num_ranks, size)
            if name == "tree_broadcast":
                assert torch.equal(tensor, given[rest[0]])
            elif name != "tree_reduce" or rest[1] == rank:
                assert torch.equal(tensor, REDUCTIONS[rest[0]](given, 0)), (name, size, rest)


def test_the_cost_model_at_hand_computed_values():
    """4 ranks, 4 MB, 1 ms, 1 GB/s: each rank sends 4 MB twice in two rounds (tree), or 6 MB in all."""
    assert collectives.time_s("tree", 4, 4e6, 1e-3, 1e9) == pytest.approx(4 * 1e-3 + 16e-3)
    assert collectives.time_s("ring", 4, 4e6, 1e-3, 1e9) == pytest.approx(6 * 1e-3 + 6e-3)
    assert collectives.time_s("halving_doubling", 4, 4e6, 1e-3, 1e9) == pytest.approx(4 * 1e-3 + 6e-3)
    with pytest.raises(ValueError, match="possible are tree, ring and halving_doubling"):
        collectives.time_s("star", 4, 1, 1, 1)
