"""What context parallelism costs: bytes on the wire, what travels meanwhile, memory, and work on real calls."""

from fractions import Fraction
from functools import partial
from math import gcd

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minidist.comm import Group, GroupSpec, Meter, World, bind
from minidist.mesh import Mesh
from minidist.models.layers import Attention
from minidist.parallel.context import kernels, ring
from minidist.parallel.context.causal import scores_per_step
from minidist.parallel.context.ulysses import ulysses_attention
from minidist.tools.deadlock.nccl_rules import violations

B, HEADS, KV_HEADS, D = 2, 12, 2, 4


def context(world: World, meter: Meter | None = None) -> Group:
    return bind(world, Mesh(cp=world.size), [GroupSpec("context", ("cp",))], meter=meter)["context"]


def own_part(length: int, dtype=torch.float64, kv_heads: int = KV_HEADS) -> list[torch.Tensor]:
    """Query, key and value of a rank."""
    return [torch.ones((B, n, length, D), dtype=dtype).requires_grad_() for n in (HEADS, kv_heads, kv_heads)]


def traffic(world: World, kind: str, length: int, dtype: torch.dtype, kv_heads: int) -> tuple:
    meter = Meter()
    group = context(world, meter)
    leaves = own_part(length, dtype, kv_heads)
    if kind == "ring":
        out = ring.ring_attention(*leaves, group, "zigzag")
    else:
        out = ulysses_attention(*leaves, partial(Attention.attend, None), group)
    forward = meter.total_wire_bytes
    out.sum().backward()
    assert [leaf.grad.dtype for leaf in leaves] == [dtype] * 3
    return forward, meter.total_wire_bytes - forward, meter.records


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_ring_sends_keys_values_and_their_gradients(ranks, size, dtype):
    length = 6
    kv = 2 * B * KV_HEADS * length * D  # of a rank; heads are sent once, not once per query head
    grads = torch.promote_types(dtype, torch.float32)
    seen = ranks(traffic, size, "ring", length, dtype, KV_HEADS)
    for forward, backward, _ in seen:
        assert forward == (size - 1) * kv * dtype.itemsize
        assert backward == (size - 1) * kv * (dtype.itemsize + grads.itemsize)
    assert violations({rank: records for rank, (_, _, records) in enumerate(seen)}) == []


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (2, 1), (3, 2), (4, 12), (4, 6)])
def test_ulysses_sends_a_share_of_what_a_rank_has(ranks, size, kv_heads):
    length, dtype = 6, torch.float64
    repeated = kv_heads * size // gcd(kv_heads, size)
    elements = B * length * D * (HEADS + 2 * repeated + HEADS)  # query, key, value and output
    seen = ranks(traffic, size, "ulysses", length, dtype, kv_heads)
    for forward, backward, records in seen:
        assert forward == backward == elements * dtype.itemsize * (size - 1) // size
        assert [record.name for record in records] == ["all_to_all"] * 4
    assert violations({rank: records for rank, (_, _, records) in enumerate(seen)}) == []


def in_order(world: World) -> tuple:
    meter = Meter()
    group = context(world, meter)
    for name in ("forward", "backward"):
        real = getattr(kernels, f"attention_{name}")

        def marked(*args, _real=real, _name=name):
            meter.event(_name)
            return _real(*args)

        setattr(kernels, f"attention_{name}", marked)
    ring.ring_attention(*own_part(4), group, "zigzag").sum().backward()
    return meter.records, meter.events


def test_a_block_travels_while_another_is_attended(ranks):
    """By the order of events: every hop but the gradients' last is launched before, and waited for after, a block."""
    for records, events in ranks(in_order, 3):
        assert [label for _, label in events] == ["forward"] * 3 + ["backward"] * 3
        hops = {record.batch: record for record in records}
        assert len(hops) == 2 + 4
        meanwhile = [
            [label for tick, label in events if hop.launched < tick < hop.waited] for _, hop in sorted(hops.items())
        ]
        assert meanwhile == [["forward"]] * 2 + [["backward"]] * 3 + [[]]


def counted(world: World, layout: str, length: int) -> list:
    """Scores of every kernel call of a rank, forward and backward, from the sizes that the kernels were given."""
    group = context(world)
    calls = []
    for name in ("forward", "backward"):
        real = getattr(kernels, f"attention_{name}")

        def counting(*args, _real=real, _name=name):
            query, key = args[:2] if _name == "forward" else args[1:3]
            rectangle = query.shape[2] * key.shape[2]
            calls.append((_name, rectangle / 2 if args[-1] else rectangle))
            return _real(*args)

        setattr(kernels, f"attention_{name}", counting)
    ring.ring_attention(*own_part(length), group, layout).sum().backward()
    return [[scores for name, scores in calls if name == which] for which in ("forward", "backward")]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_work_of_real_calls_is_what_the_formula_says(ranks, size, layout):
    length = 6
    for calls in zip(*ranks(counted, size, layout, length), strict=True):
        # Contiguous, the steps that a rank skips are its last.
        steps = [[per[step] if step < len(per) else 0 for per in calls] for step in range(size)]
        assert steps == scores_per_step(layout, size, length)
        useful = Fraction(sum(map(sum, steps))) / (size * Fraction(sum(map(max, steps))))
        assert useful == (Fraction(size, 2 * size - 1) if layout == "contiguous" else 1)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made in this context held at one time. What kernels use inside is not seen."""

    def __init__(self):
        super().__init__()
        self.peak, self._made = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        self._made = {key: held for key, held in self._made.items() if not held[0].expired()}
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
        return made


def remembered(world: World, layout: str, length: int) -> tuple:
    """Peaks of forward and backward, and what autograd keeps between them, in bytes."""
    group = context(world)
    leaves = own_part(length)
    kept = {}

    def keep(x):
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ring.ring_attention(*leaves, group, layout)
    with torch.no_grad():
        with LiveBytes() as there:
            out, lse = ring.ring_forward(*leaves, group, layout)
        with LiveBytes() as back:
            ring.ring_backward(out, *leaves, out, lse, group, layout)
    return there.peak, back.peak, sum(kept.values())


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_memory_depends_on_a_ranks_own_part_only(ranks, layout):
    own = 12
    small, large = ranks(remembered, 4, layout, own), ranks(remembered, 5, layout, own)
    assert set(large) == set(small), "a longer sequence on more ranks is the same to each of them"
    twice = ranks(remembered, 4, layout, 2 * own)
    assert twice == [tuple(2 * n for n in each) for each in small], "and it grows with the part, not with its square"
    query, kv, lse = B * HEADS * own * D * 8, 2 * B * KV_HEADS * own * D * 8, B * HEADS * own * 8
    for forward, backward, kept in small:
        assert kept == 2 * query + kv + lse  # query, output; key and value; log-sum-exp
        # This rank's block, two on the way. Output, the block's, and while they are merged both scaled and their sum.
        assert forward <= 3 * kv + 5 * query + 6 * lse
        # Two blocks, three of gradients, a share of them. Repeated for the kernel key and value are like two queries,
        # and so are their gradients; with those of the query, of the block and in all, that is six.
        assert backward <= 6 * kv + 6 * query + lse
