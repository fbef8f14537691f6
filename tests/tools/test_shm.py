"""The backend `shm`: registered with torch, right in every operation, and independent of how tensors are split."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minidist.comm import World
from minidist.tools.shm import group_creation
from minidist.tools.shm.arena import ARENA_BYTES
from minidist.tools.shm.group import ShmGroup
from tests.helpers.exhaustive import exhaustive
from tests.helpers.shm_trials import compare_with_gloo, kill_one_rank

linux = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux; elsewhere it is gloo")
pytestmark = linux

ORDERS = {
    "shm first": "import sys, minidist.tools.shm; assert 'torch' not in sys.modules; import torch.distributed as dist",
    "torch first": "import torch.distributed as dist, minidist.tools.shm",
    "torch of one's own": "import minidist.tools.shm, torch; import torch.distributed as dist",
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_plain_import_makes_it_known_to_torch(order, tmp_path):
    program = f"""{ORDERS[order]}
import torch
dist.init_process_group("shm", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
x = torch.ones(3); dist.all_reduce(x); assert x.tolist() == [1, 1, 1]; print(dist.get_backend())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stdout, result.stderr) == (0, "shm\n", "")  # it ends well without being destroyed


@pytest.mark.parametrize("size, seed", [(3, 1), *exhaustive((2, 0), (4, 2))])
def test_random_operations_agree_with_gloo(ranks, size, seed):
    assert min(ranks(compare_with_gloo, size, seed, 120)) > 60


@pytest.mark.parametrize("seed, size", [(1, 3), *exhaustive((0, 2), (2, 3))])
def test_a_killed_rank_is_reported_by_all_others(server, tmp_path, seed, size):
    seconds, _ = kill_one_rank(server, seed, size, tmp_path)
    assert seconds < 5.0  # a promise of the backend, not a measurement


def cut_differently(world: World) -> tuple:
    group = dist.new_group(backend="shm")
    mine = torch.randn(1_300_007, generator=torch.Generator().manual_seed(world.rank))
    parts = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(parts, mine, group=group)
    by_rank = parts[0].clone()
    for part in parts[1:]:
        by_rank += part
    whole, pieces = mine.clone(), mine.clone()
    dist.all_reduce(whole, group=group)
    for piece in pieces.split(77_777):
        dist.all_reduce(piece, group=group)
    padded = torch.cat([mine, mine[: -len(mine) % world.size]])
    own = torch.empty(len(padded) // world.size)
    dist.reduce_scatter_tensor(own, padded, group=group)
    of_own = torch.cat([by_rank, by_rank[: -len(mine) % world.size]]).chunk(world.size)[world.rank]
    within = padded.clone().chunk(world.size)[world.rank]  # the result goes where this rank's own part was
    dist.reduce_scatter_tensor(within, within._base, group=group)
    return tuple(torch.equal(a, b) for a, b in ((whole, by_rank), (pieces, by_rank), (own, of_own), (within, of_own)))


@pytest.mark.parametrize("size", [3, 4])
def test_sums_are_taken_in_the_order_of_the_ranks_however_a_tensor_is_cut(ranks, size):
    assert ranks(cut_differently, size) == [(True,) * 4] * size


def averages(world: World) -> list:
    group = dist.new_group(backend="shm")
    small, large = torch.full((3,), world.rank + 1.0), torch.full((600_000,), world.rank + 1.0)
    for tensor in (small, large):
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
    bits = torch.tensor([1 << world.rank])
    dist.all_reduce(bits, op=dist.ReduceOp.BOR, group=group)
    transposed = torch.arange(6.0).view(2, 3).t().requires_grad_()  # dense, not contiguous, a leaf
    dist.all_reduce(transposed, group=group)
    return [small[0].item(), large.unique().tolist(), bits.item(), transposed.tolist()]


def test_averages_bits_and_dense_tensors_of_any_order(ranks):
    twice = [[0, 6], [2, 8], [4, 10]]
    assert ranks(averages, 2) == [[1.5, [1.5], 3, twice]] * 2


def many_groups(world: World) -> tuple:
    everyone, total = list(range(world.size)), 0.0
    groups = [dist.new_group(everyone, backend="shm") for _ in range(12)]
    for i, group in enumerate(groups):
        tensor = torch.full((400_000,), float(i))
        dist.all_reduce(tensor, group=group)
        total += tensor[-1].item()
    size = os.fstat(group_creation._CONTEXT[0].arena.fd).st_size
    for group in groups:
        dist.destroy_process_group(group)
    for i in range(30):  # what was destroyed is used again
        group = dist.new_group(everyone, backend="shm")
        tensor = torch.full((400_000,), float(i))
        dist.all_reduce(tensor, group=group)
        assert tensor.unique().item() == i * world.size
        dist.destroy_process_group(group)
    kept = dist.new_group(everyone, backend="shm")
    here = group_creation._CONTEXT[0]
    free = here.arena.largest_free_block_bytes()
    for _ in range(3):
        group = dist.new_group(everyone, backend="shm")
        dist.all_reduce(torch.ones(400_000), group=group)
        dist.destroy_process_group(group)
    dist.barrier()  # now all have left, and nothing is held
    here.reclaim_memory()
    assert here.arena.largest_free_block_bytes() == free
    dist.destroy_process_group(kept)
    return total, size, len(group_creation._CONTEXT)


def test_all_groups_of_a_process_share_one_bounded_arena(ranks):
    assert ranks(many_groups, 2, backend="gloo") == [(2.0 * sum(range(12)), ARENA_BYTES, 0)] * 2
    assert ARENA_BYTES <= 8 * 2**20


def as_the_string_says(world: World) -> tuple:
    dist.destroy_process_group()
    names = []
    for i, name in enumerate(("cpu:shm,cuda:nccl", "shm", "cpu:shm")):
        store = dist.PrefixStore(str(i), world.store)
        dist.init_process_group(name, store=store, rank=world.rank, world_size=world.size)
        x = torch.ones(2)
        dist.all_reduce(x)
        names.append((type(dist.group.WORLD).__name__, x.tolist()))
        dist.destroy_process_group()
    return tuple(names)


def test_one_group_serves_both_devices_whatever_the_string(ranks):
    """torch gives a group written in Python all devices, so `cuda:nccl` is honoured by the group inside of it."""
    assert ranks(as_the_string_says, 2) == [(("ShmGroup", [2.0, 2.0]),) * 3] * 2


def apart(world: World) -> tuple:
    group_creation._shared_memory_domain = lambda: f"host {world.rank}"
    group = dist.new_group(backend="shm")
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    return isinstance(group, ShmGroup), x.tolist()


def test_ranks_of_different_hosts_talk_over_gloo_and_one_says_so(server):
    result = server.run(apart, 2, deadline_s=60)
    assert result.values == [(False, [2.0, 2.0])] * 2
    message = [line for line in "".join(result.output).splitlines() if "backend shm" in line]
    assert len(message) == 1 and "different hosts" in message[0] and "gloo" in message[0]


# What torch's own base class does well enough, or what is a fact that it stores.
INHERITED = {
    "bound_device_id", "boxed", "unbox", "get_group_store", "rank", "size", "_backend_id", "_id",
    "_set_default_backend", "_register_backend", "_get_backend_name", "_set_group_name",
}  # fmt: skip
# What belongs to torch's C++ backends: the base class refuses it, and so do we, in our own words.
REFUSED = {
    "_get_backend": (torch.device("cpu"),), "_has_hooks": (), "_register_on_completion_hook": (print,),
    "_wait_for_pending_works": (), "_enable_collectives_timing": (), "merge_remote_group": (None, 2),
    "split_group": ([0],), "use_pg_for_symm_mem_rendezvous": (), "recv_anysource": ([torch.empty(1)],),
}  # fmt: skip


def test_every_method_of_a_process_group_is_ours_or_accounted_for():
    theirs = {name for name, _ in inspect.getmembers(dist.ProcessGroup) if not name.startswith("__")}
    theirs -= {name for name in theirs if isinstance(getattr(dist.ProcessGroup, name), dist.ProcessGroup.BackendType)}
    theirs -= {"BackendType", "_pybind11_conduit_v1_"}
    missing = {name for name in theirs if name not in vars(ShmGroup)} - INHERITED
    assert not missing
    assert len(theirs) > 40


def refusals(world: World) -> list:
    group, message = dist.new_group(backend="shm"), []
    for name, arguments in REFUSED.items():
        try:
            getattr(group, name)(*arguments)
            message.append(f"{name} did not raise")
        except RuntimeError as error:
            if "backend shm" not in str(error):
                message.append(f"{name}: {error}")
    return message


def test_unsupported_operations_are_refused_with_a_message(ranks):
    assert ranks(refusals, 2) == [[], []]


def mapped(world: World) -> set[str]:
    group = dist.new_group(backend="shm")
    dist.all_reduce(torch.ones(3_000_000), group=group)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/memfd:" in line or "/dev/shm" in line}


def test_shared_memory_is_unlinked(ranks):
    """So nothing can be left in /dev/shm, however a rank ends; the end of the test session looks there as well."""
    status = "/memfd:minidist-status (deleted)"  # the rank server's own
    assert ranks(mapped, 2) == [{"/memfd:minidist-shm (deleted)", status}] * 2
