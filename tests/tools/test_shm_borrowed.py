"""A group of `shm` created when little shared memory is left borrows memory and returns it."""

import sys

import pytest
import torch
import torch.distributed as dist

from minidist.comm import World
from minidist.tools.shm import group_creation
from minidist.tools.shm.slots import SLOTS
from tests.helpers.exhaustive import exhaustive
from tests.helpers.shm_trials import compare_with_gloo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux; elsewhere it is gloo")
GROUPS, NUMEL = 8, 2**20


@pytest.mark.parametrize("size, seed", [(3, 4), *exhaustive((2, 3), (4, 5))])
def test_random_operations_of_many_groups_agree_with_gloo(ranks, size, seed):
    assert min(ranks(compare_with_gloo, size, seed, 150, 3)) > 60


def meetings(world: World) -> tuple[list[int], list[int], list[bool]]:
    """For each group: how often its ranks meet in an all-gather and a reduce-scatter of 4 MiB of each rank; the least
    that takes through the slots it keeps; whether values were right and as much was free after as before."""
    here, counts, kept, all_equal = None, [], [], []
    for _ in range(GROUPS):
        group = dist.new_group(backend="shm")
        here = here or group_creation._CONTEXT[0]
        collectives = group._resources.collectives
        meet = collectives.barrier.exchange
        dist.all_reduce(torch.ones(NUMEL), group=group)  # slots are leased
        free, count = here.arena.largest_free_block_bytes(), []
        collectives.barrier.exchange = lambda message=b"", meet=meet, count=count: (count.append(1), meet(message))[1]
        whole, own = torch.empty(NUMEL * world.size), torch.full((NUMEL,), world.rank + 1.0)
        dist.all_gather_into_tensor(whole, own, group=group)
        right = whole.view(world.size, -1).eq(torch.arange(1.0, world.size + 1)[:, None]).all().item()
        dist.reduce_scatter_tensor(own, whole, group=group)
        right &= own.eq(world.size * (world.rank + 1)).all().item()
        counts.append(len(count))
        kept.append(own.nbytes // collectives._large.bytes + own.nbytes * world.size // collectives._large.bytes)
        all_equal.append(right and here.arena.largest_free_block_bytes() == free)
    return counts, kept, all_equal


@pytest.mark.parametrize("size", [2, 3])
def test_a_late_group_returns_borrowed_memory(ranks, size):
    for counts, kept, all_equal in ranks(meetings, size, backend="gloo"):
        assert all(all_equal)
        assert counts[0] <= kept[0] + 2  # the first needs no other slots than its own
        assert kept[-1] > 4 * counts[-1]  # what a group would have to do that does not borrow


def order(world: World) -> list[list[str]]:
    """The order in an all-gather of the first and the last group: ranks "meet", and "read" the others' data."""
    groups, seen = [dist.new_group(backend="shm") for _ in range(GROUPS)], []
    for group in groups:
        dist.all_reduce(torch.ones(NUMEL), group=group)
    for group in (groups[0], groups[-1]):
        collectives, happened = group._resources.collectives, []
        stream, meet = collectives._stream, collectives.barrier.exchange

        def reading(slots, n, step, fill, drain, *told, stream=stream, happened=happened):
            return stream(slots, n, step, fill, lambda *at: (happened.append("read"), drain(*at)), *told)

        collectives._stream = reading
        collectives.barrier.exchange = lambda m=b"", meet=meet, happened=happened: (happened.append("meet"), meet(m))[1]
        dist.all_gather_into_tensor(torch.empty(NUMEL * world.size), torch.ones(NUMEL), group=group)
        seen.append(happened)
    return seen


def test_borrowed_memory_is_returned_after_all_ranks_have_read(ranks):
    for first, last in ranks(order, 2, backend="gloo"):
        assert first == ["meet", "read"] * 4  # 4 MiB in slots of 1 MiB
        pieces = (len(last) - 2) // 2
        assert last == ["meet"] + ["meet", "read"] * pieces + ["meet"] and pieces < 24


def taken_meanwhile(world: World) -> bool:
    """One rank has no memory to borrow, so all ranks use the smallest slots of any rank."""
    groups = [dist.new_group(backend="shm") for _ in range(GROUPS)]
    for group in groups:
        dist.all_reduce(torch.ones(NUMEL), group=group)
    arena = group_creation._CONTEXT[0].arena
    if world.rank == 1:
        arena.lease_block(arena.largest_free_block_bytes())
    borrowed = groups[-1]._resources.collectives._temporary
    tensor = torch.full((NUMEL,), world.rank + 1.0)
    dist.all_reduce(tensor, group=groups[-1])
    kept = groups[-1]._resources.collectives._large
    return tensor.unique().tolist() == [3.0] and borrowed.bytes == kept.bytes < kept.lease[1] // SLOTS * 4


def test_without_memory_to_borrow_the_kept_slots_serve(ranks):
    assert ranks(taken_meanwhile, 2, backend="gloo") == [True, True]


def broken_off(world: World) -> tuple[str, bool, bool]:
    """What is said when an operation fails in which memory was borrowed; whether it stays taken until the group ends,
    and no longer."""
    for _ in range(GROUPS):
        dist.all_reduce(torch.ones(NUMEL), group=dist.new_group(backend="shm"))
    here = group_creation._CONTEXT[0]
    free = here.arena.largest_free_block_bytes()
    late, text = dist.new_group(backend="shm"), ""
    dist.all_reduce(torch.ones(NUMEL), group=late)
    between = here.arena.largest_free_block_bytes()
    try:
        dist.all_reduce(torch.ones(NUMEL + world.rank), group=late)
    except dist.DistBackendError as error:
        text = str(error)
    taken = here.arena.largest_free_block_bytes() < between
    dist.destroy_process_group(late)
    dist.barrier()  # all have left
    here.reclaim_memory()
    return text, taken, here.arena.largest_free_block_bytes() == free


def test_a_failed_operation_keeps_its_lease_until_the_group_ends(ranks):
    for text, *leases in ranks(broken_off, 2, backend="gloo"):
        assert "do not do the same" in text and leases == [True, True]
