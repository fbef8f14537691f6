"""Reports about programs that hang, each for another reason."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from minidist.comm import GroupSpec, all_reduce, barrier, bind, broadcast, recv, send
from minidist.errors import format_ranks
from minidist.mesh import Mesh
from minidist.tools.launch import RankFailure

pytestmark = pytest.mark.process_lifecycle

GRADS = GroupSpec("grads", ("dp",))
DEADLINE_S = 30.0  # a missed verdict fails as "deadline", not as a hang


def groups(world, *uses):
    return bind(world, Mesh(dp=world.size), uses or (GRADS,))


def failure(server, function, ranks, *args) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        server.run(function, ranks, args, deadline_s=DEADLINE_S)
    assert len(str(caught.value).splitlines()) < 15, str(caught.value)
    return caught.value


def line_of(function, text) -> str:
    """`tools/file.py:line` of the line in `function` that contains `text`."""
    import inspect

    lines, start = inspect.getsourcelines(function)
    (at,) = [start + i for i, line in enumerate(lines) if text in line]
    return f"tools/{os.path.basename(__file__)}:{at}"


def skip_one_all_reduce(world):
    grads = groups(world)["grads"]
    tensor = torch.zeros(3, 5)
    for step in range(3):
        if (world.rank, step) != (2, 2):
            all_reduce(tensor, grads)


def test_a_skipped_all_reduce_names_the_rank_that_skipped_it(server):
    error = failure(server, skip_one_all_reduce, 4)
    where = line_of(skip_one_all_reduce, "all_reduce(tensor")
    # On a busy machine one of the three may not have come to its wait yet when the others are already lost.
    assert error.kind == "deadlock" and error.ranks and set(error.ranks) <= {0, 1, 3}
    who = format_ranks(error.ranks)
    assert f"{who}: waiting in all_reduce #3 (3, 5) float32 of 'grads' (ranks 0-3) at {where}" in str(error)
    assert "rank 2: returned" in str(error)
    assert "rank 2 returned without launching all_reduce #3 of 'grads'" in str(error)


def send_head_to_head(world):
    grads = groups(world)["grads"]
    peer, tensor = 1 - world.rank, torch.zeros(10)
    send(tensor, peer, grads)
    recv(tensor, peer, grads)


def test_two_blocking_sends_to_each_other_are_a_cycle(server):
    error = failure(server, send_head_to_head, 2)
    where = line_of(send_head_to_head, "send(tensor")
    assert error.kind == "deadlock" and error.ranks == (0, 1)
    assert f"rank 0: waiting in send to rank 1 #1 (10,) float32 of 'grads' (ranks 0-1) at {where}" in str(error)
    assert "rank 0 waits for rank 1 to launch recv #1 from rank 0 of 'grads'" in str(error)
    assert "rank 1 waits for rank 0 to launch recv #1 from rank 1 of 'grads'" in str(error)


def different_operations(world):
    grads = groups(world)["grads"]
    tensor = torch.zeros(4)
    all_reduce(tensor, grads)
    if world.rank == 0:
        all_reduce(tensor, grads)
    else:
        broadcast(tensor, 1, grads)
        barrier(grads)


def test_different_operations_at_one_sequence_number_are_both_named(server):
    error = failure(server, different_operations, 2)
    assert "operation #2 of 'grads'" in str(error)
    assert "rank 0: all_reduce (4,) float32" in str(error) and "rank 1: broadcast root 1 (4,) float32" in str(error)


def two_groups_crossed(world):
    made = groups(world, GroupSpec("a", ("dp",)), GroupSpec("b", ("dp",)))
    first, second = ("a", "b") if world.rank == 0 else ("b", "a")
    all_reduce(torch.zeros(2), made[first])
    all_reduce(torch.zeros(2), made[second])


def test_groups_used_in_opposite_orders_are_a_cycle(server):
    error = failure(server, two_groups_crossed, 2)
    assert error.kind == "deadlock"
    assert "rank 0 waits for rank 1 to launch all_reduce #1 of 'a'" in str(error)
    assert "rank 1 waits for rank 0 to launch all_reduce #1 of 'b'" in str(error)


def one_pair_is_stuck(world):
    made = bind(world, Mesh(pp=2, dp=2), (GroupSpec("pair", ("dp",)),))["pair"]
    if world.rank == 1:
        return
    if world.rank == 0:
        all_reduce(torch.zeros(2), made)
    while True:  # ranks 2 and 3 have work for ever
        sum(range(10_000))


def test_a_deadlock_of_some_ranks_is_reported_while_others_work(server):
    error = failure(server, one_pair_is_stuck, 4)
    assert error.kind == "deadlock" and error.ranks == (0,)
    assert "rank 1 returned without launching all_reduce #1 of 'pair'" in str(error)


def compute_long_then_reduce(world, seconds):
    import time

    grads = groups(world)["grads"]
    tensor = torch.ones(2)
    if world.rank == 1:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            sum(range(10_000))
    all_reduce(tensor, grads)
    return tensor.tolist()


def test_a_slow_rank_is_not_a_deadlock(ranks):
    assert ranks(compute_long_then_reduce, 2, 1.5) == [[2.0, 2.0]] * 2


def receive_from_one_that_dies(world, how):
    grads = groups(world)["grads"]
    if world.rank == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    recv(torch.zeros(7), 1, grads)


@pytest.mark.parametrize(("how", "description"), [("exit", "exited with code 3"), ("kill", "killed by SIGKILL")])
def test_a_death_is_reported_with_what_the_others_waited_for(server, how, description):
    error = failure(server, receive_from_one_that_dies, 2, how)
    assert error.kind == "died" and error.ranks == (1,)
    where = line_of(receive_from_one_that_dies, "recv(")
    assert f"rank 1 died: {description}" in str(error)
    assert f"rank 0: waiting in recv from rank 1 #1 (7,) float32 of 'grads' (ranks 0-1) at {where}" in str(error)


def raise_while_others_wait(world):
    grads = groups(world)["grads"]
    if world.rank == 1:
        raise ValueError("no such batch")
    all_reduce(torch.zeros(2), grads)


def test_an_exception_is_reported_before_the_wait_it_caused(server):
    error = failure(server, raise_while_others_wait, 4)
    assert error.kind == "raised" and error.ranks == (1,)
    assert str(error).startswith("rank 1 raised ValueError: no such batch\n")
    assert "ranks 0, 2-3: waiting in all_reduce #1" in str(error)


def raw_call(world):
    if world.rank == 0:
        dist.all_reduce(torch.zeros(2))
    return world.rank


def test_a_raw_call_that_hangs_ends_at_the_deadline_with_its_line(server):
    for deadline_s in (1.0, 4.0, 32.0):  # a busy machine may need longer to come as far as the call
        with pytest.raises(RankFailure) as caught:
            server.run(raw_call, 2, deadline_s=deadline_s)
        error = caught.value
        assert error.kind == "deadline" and f"not done after {deadline_s:g} s" in str(error)
        if "in raw_call" in error.stacks.get(0, "") and "rank 1: returned" in str(error):
            break
    assert f"line {line_of(raw_call, 'dist.all_reduce').rpartition(':')[2]} in raw_call" in error.stacks[0]
    assert "rank 1: returned" in str(error)
