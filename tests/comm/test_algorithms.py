"""Collectives built on send and receive, against exact arithmetic and the backend's collectives, on real ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import comm
from minidist.comm import GroupSpec, Meter, World, bind
from minidist.comm.algorithms import ALGORITHMS, hierarchical_all_reduce, parameter_server_step
from minidist.mesh import Mesh
from minidist.tools.network.algorithm_bytes import sent_elements_by_algorithm, sent_elements_hierarchical
from tests.helpers.exhaustive import exhaustive

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8]
OPS = ["sum", "mean", "max", "min", "product"]
COUNTS = [0, 1, 2, 5, 7, 8, 23]
NAMES = [(name, algorithm) for name, algorithms in ALGORITHMS.items() for algorithm in algorithms]


def make_group(world: World):
    return bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"]


def draw(seed: int, rank: int, shape, dtype: torch.dtype) -> torch.Tensor:
    """A rank's input: different on every rank, of both signs, or small non-negative integers for an integer dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 50, shape, generator=generator).to(dtype)


def exact_reduction(every: torch.Tensor, op: str) -> torch.Tensor:
    """The exact reduction over ranks of (rank, n), in float64, or in int64 for integers."""
    wide = every.double() if every.is_floating_point() else every.long()
    if op in ("max", "min"):
        return wide.amax(0) if op == "max" else wide.amin(0)
    if op == "product":
        return wide.prod(0)
    return wide.sum(0) / (len(every) if op == "mean" else 1) if every.is_floating_point() else wide.sum(0)


def assert_within_rounding(got: torch.Tensor, every: torch.Tensor, op: str) -> None:
    """Check that `got` is the reduction of (rank, n): exactly for integers, max and min, else within rounding.

    A sum of p numbers rounds p - 1 times, whatever the order, each time by at most eps/2 of a partial sum, which is at
    most sum |x| (1 + p eps): (p - 1) eps sum |x| is twice that. A mean rounds once more, a product p - 1 times by eps/2
    of itself. Below its smallest normal number a float16 rounds by up to `tiny eps`, whatever the value.
    """
    expected, p = exact_reduction(every, op), len(every)
    if not every.is_floating_point() or op in ("max", "min"):
        assert torch.equal(got, expected.to(got.dtype)), f"{got} is not {expected}"
        return
    info = torch.finfo(every.dtype)
    size = expected.abs() if op == "product" else every.double().abs().sum(0) / (p if op == "mean" else 1)
    bound = p * (info.eps * size + info.tiny * info.eps) * 2
    assert ((got.double() - expected).abs() <= bound).all(), f"{got} is not {expected}"


def assert_same_bits(group, tensor: torch.Tensor) -> None:
    """All ranks hold the same bits."""
    mine = tensor.contiguous().view(-1).view(torch.uint8)
    every = mine.new_empty(group.size * mine.numel())
    comm.all_gather(every, mine, group)
    assert (every.view(group.size, -1) == mine).all()


def run_and_check(group, name: str, algorithm: str, seed: int, n: int, dtype: torch.dtype, op: str, root: int) -> None:
    """One operation by an algorithm, checked on this rank. n: elements, per rank where the operation has parts."""
    run, p, rank = ALGORITHMS[name][algorithm], group.size, group.rank
    parts = name in ("all_gather", "reduce_scatter", "all_to_all")
    every = torch.stack(
        [draw(seed, r, (p * n if name in ("reduce_scatter", "all_to_all") else n,), dtype) for r in range(p)]
    )
    mine = every[rank].clone()
    out = torch.full((p * n if name != "reduce_scatter" else n,), 77, dtype=dtype) if parts else mine
    match name:
        case "broadcast":
            run(mine, root, group)
            assert torch.equal(mine, every[root])
        case "reduce":
            run(mine, root, group, op)
            if rank == root:
                assert_within_rounding(mine, every, op)
        case "all_reduce":
            run(mine, group, op)
            assert_within_rounding(mine, every, op)
            assert_same_bits(group, mine)
        case "all_gather":
            run(out, mine, group)
            assert torch.equal(out, every.view(-1)) and torch.equal(mine, every[rank])
        case "reduce_scatter":
            run(out, mine, group, op)
            assert_within_rounding(out, every[:, rank * n : (rank + 1) * n], op)
            assert torch.equal(mine, every[rank])
        case "all_to_all":
            run(out, mine, group)
            assert torch.equal(out, every[:, rank * n : (rank + 1) * n].reshape(-1))


def check_every_case(world: World) -> int:
    group, checks = make_group(world), 0
    for name, algorithm in NAMES:
        for i, n in enumerate(COUNTS):
            for dtype in DTYPES[i % 2 :: 2]:
                op = OPS[i % len(OPS)]
                op = "sum" if op == "mean" and dtype not in FLOATS else op
                run_and_check(group, name, algorithm, i, n, dtype, op, root=i % world.size)
                checks += 1
    return checks


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_algorithm_matches_exact_arithmetic(ranks, size):
    assert ranks(check_every_case, size) == [len(NAMES) * 25] * size  # 7 counts with 4 and 3 dtypes in turn


def compare_with_backend(world: World, cases: list) -> int:
    """The same numbers through our algorithm and through the backend's collective."""
    group = make_group(world)
    for name, algorithm, seed, n, dtype, op, root in cases:
        run, p, rank, root = ALGORITHMS[name][algorithm], world.size, world.rank, root % world.size
        run_and_check(group, name, algorithm, seed, n, dtype, op, root)
        if op == "mean" or name == "reduce":  # the collectives have neither
            continue
        whole = p * n if name in ("reduce_scatter", "all_to_all") else n
        ours, theirs = draw(seed, rank, (whole,), dtype), draw(seed, rank, (whole,), dtype)
        outs = [torch.empty(n if name == "reduce_scatter" else p * n, dtype=dtype) for _ in range(2)]
        match name:
            case "broadcast":
                run(ours, root, group)
                comm.broadcast(theirs, root, group)
            case "all_reduce":
                run(ours, group, op)
                comm.all_reduce(theirs, group, op)
            case "reduce_scatter":
                run(outs[0], ours, group, op)
                comm.reduce_scatter(outs[1], theirs, group, op)
            case "all_gather" | "all_to_all":
                run(outs[0], ours, group)
                getattr(comm, name)(outs[1], theirs, group)
        ours, theirs = (ours, theirs) if name in ("broadcast", "all_reduce") else outs
        if dtype in FLOATS and op in ("sum", "product"):
            every = torch.stack([draw(seed, r, (whole,), dtype) for r in range(p)])
            every = every[:, rank * n : (rank + 1) * n] if name == "reduce_scatter" else every
            size = every.double().abs()
            size = size.sum(0) if op == "sum" else size.prod(0)
            info = torch.finfo(dtype)
            if name in ("all_reduce", "reduce_scatter"):
                # Each is within p eps of the exact result (`assert_within_rounding`), so the two differ by 2 p eps.
                bound = 4 * p * (info.eps * size + info.tiny * info.eps)
                assert ((ours.double() - theirs.double()).abs() <= bound).all()
                continue
        assert torch.equal(ours, theirs)
    return len(cases)


@st.composite
def cases(draw):
    name, algorithm = draw(st.sampled_from(NAMES))
    dtype = draw(st.sampled_from(DTYPES))
    op = draw(st.sampled_from(OPS if dtype in FLOATS else [op for op in OPS if op != "mean"]))
    return name, algorithm, draw(st.integers(0, 999)), draw(st.integers(0, 70)), dtype, op, draw(st.integers(0, 7))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_random_cases_match_the_backends_collective(ranks, size):
    # A job costs a fork, so an example is a list of cases; few and long instead of many and short.
    @settings(max_examples=3)
    @given(st.lists(cases(), min_size=10, max_size=20))
    def check(many):
        assert ranks(compare_with_backend, size, many) == [len(many)] * size

    check()


def check_uneven_all_to_all(world: World) -> int:
    group, p, rank = make_group(world), world.size, world.rank
    rows = [[(a + 2 * b) % 3 for b in range(p)] for a in range(p)]  # rows[a][b]: rows that rank a sends to rank b
    every = [draw(1, a, (sum(rows[a]), 2), torch.float32) for a in range(p)]
    received = [rows[a][rank] for a in range(p)]
    got = torch.empty(sum(received), 2)
    ALGORITHMS["all_to_all"]["pairwise"](got, every[rank].clone(), group, received, rows[rank])
    parts = [every[a][sum(rows[a][:rank]) :][: rows[a][rank]] for a in range(p)]
    assert torch.equal(got, torch.cat(parts))
    expected = sent_elements_by_algorithm(
        "all_to_all", "pairwise", 2 * sum(rows[rank]), p, rank, splits=[2 * r for r in rows[rank]]
    )
    assert group.meter.total_wire_bytes == 4 * expected
    return expected


def test_all_to_all_accepts_uneven_splits(ranks):
    assert any(ranks(check_uneven_all_to_all, 3)) and ranks(check_uneven_all_to_all, 1) == [0]


def check_hierarchical(world: World, nodes: int) -> int:
    per_node = world.size // nodes
    groups = bind(
        world, Mesh(pp=nodes, dp=per_node), [GroupSpec("inside", ("dp",)), GroupSpec("across", ("pp",))], meter=Meter()
    )
    sent = 0
    for seed, n in enumerate((0, 1, 4, 11)):
        for op in ("sum", "mean", "max"):
            every = torch.stack([draw(seed, r, (n,), torch.float32) for r in range(world.size)])
            mine, before = every[world.rank].clone(), groups.meter.total_wire_bytes
            hierarchical_all_reduce(mine, groups["inside"], groups["across"], op)
            got = groups.meter.total_wire_bytes - before
            assert got == 4 * sent_elements_hierarchical(n, nodes, per_node, world.rank)
            assert_within_rounding(mine, every, op)
            assert_same_bits(groups["control"], mine) if world.size > 1 else None
            sent += got
    return sent


@pytest.mark.parametrize("nodes, size", [(1, 1), (1, 3), (2, 4), (3, 6), *exhaustive((2, 2), (2, 6), (4, 8))])
def test_hierarchical_all_reduce_reduces_over_all_nodes(ranks, nodes, size):
    assert all(sent > 0 for sent in ranks(check_hierarchical, size, nodes)) == (size > 1)


def check_parameter_server_step(world: World) -> tuple:
    group = make_group(world)
    gradients = [draw(3, r, (7,), torch.float64) for r in range(world.size)]
    root, calls = world.size - 1, []

    def update(parameters, gradient):
        calls.append(gradient.clone())
        parameters.sub_(0.1 * gradient)

    parameters, mine = torch.full((7,), float(world.rank + 1), dtype=torch.float64), gradients[world.rank].clone()
    parameter_server_step(parameters, mine, update, group, root, "mean")
    mean = torch.stack(gradients).mean(0)
    torch.testing.assert_close(parameters, float(root + 1) - 0.1 * mean, rtol=1e-14, atol=1e-15)
    assert len(calls) == (world.rank == root)
    assert world.rank == root or torch.equal(mine, gradients[world.rank])
    assert group.meter.total_wire_bytes == 8 * sent_elements_by_algorithm(
        "parameter_server_step", "flat", 7, world.size, world.rank, root=root
    )
    return tuple(parameters.tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_parameter_server_step_broadcasts_the_roots_new_parameters(ranks, size):
    assert len(set(ranks(check_parameter_server_step, size))) == 1


def sum_in_bfloat16(world: World) -> dict:
    """Sums of one large and many small numbers, where rounding after every addition loses the small ones."""
    group, got = make_group(world), {}
    for algorithm, run in ALGORITHMS["all_reduce"].items():
        mine = torch.tensor([256.0 if world.rank == 0 else 1.0], dtype=torch.bfloat16)
        run(mine, group)
        got[algorithm] = mine.item()
    return got


def test_naive_rounds_bfloat16_sums_once_and_the_others_every_partial_sum(ranks):
    # bfloat16 has 8 bits: 257 lies between 256 and 258 and rounds to 256. Exact: 256 + 4 = 260.
    # The ring adds the ones one by one, and each is rounded away; the others add two ones first: 258 is representable.
    expected = {"naive": 260.0, "tree": 258.0, "ring": 256.0, "doubling": 258.0, "rabenseifner": 258.0}
    assert ranks(sum_in_bfloat16, 5) == [expected] * 5


def collect_errors(world: World) -> list[str]:
    group, message = make_group(world), []
    calls = [
        lambda: ALGORITHMS["all_reduce"]["ring"](torch.ones(3, dtype=torch.int64), group, "mean"),
        lambda: ALGORITHMS["reduce"]["tree"](torch.ones(3), 0, group, "xor"),
        lambda: ALGORITHMS["reduce"]["flat"](torch.ones(3, dtype=torch.int32), 0, group, "mean"),
        lambda: ALGORITHMS["all_reduce"]["naive"](torch.ones(3, 2).t(), group),
        lambda: ALGORITHMS["all_gather"]["ring"](torch.ones(3), torch.ones(2), group),
        lambda: ALGORITHMS["reduce_scatter"]["halving"](torch.ones(3), torch.ones(2), group),
        lambda: ALGORITHMS["all_to_all"]["pairwise"](torch.ones(3), torch.ones(3), group),
        lambda: ALGORITHMS["all_to_all"]["pairwise"](torch.ones(2), torch.ones(2), group, [1, 1], [2, 1]),
    ]
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        message.append(str(error.value))
    assert not group.meter.records
    return message


def test_invalid_calls_are_refused_before_anything_is_sent(ranks):
    for message in ranks(collect_errors, 2):
        assert message[0] == "no mean of torch.int64: take the sum and divide it the way you need"
        assert message[1] == "no reduction 'xor': possible are sum, mean, max, min, product"
        assert message[2].startswith("no mean of torch.int32")
        assert "shape [2, 3] and strides (1, 2) is not contiguous" in message[3]
        assert "the full tensor has 3 elements" in message[4] and "the full tensor has 2 elements" in message[5]
        assert message[6] == "all_to_all over 2 ranks: the 3 rows of output cannot be split into 2 equal parts"
        assert message[7] == "all_to_all over 2 ranks: the 2 rows of input cannot be split into parts of [2, 1] rows"
