"""Costs of context parallelism: bytes on the wire, overlap with attention, scores computed, and memory."""

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
from minidist.parallel.context.ulysses import ulysses_attention
from minidist.tools.deadlock.nccl_rules import find_nccl_violations
from minidist.tools.simulate.context_balance import scores_per_ring_step

B, HEADS, KV_HEADS, D = 2, 12, 2, 4


def make_group(world: World, meter: Meter | None = None) -> Group:
    return bind(world, Mesh(cp=world.size), [GroupSpec("context", ("cp",))], meter=meter)["context"]


def local_query_key_value(length: int, dtype=torch.float64, kv_heads: int = KV_HEADS) -> list[torch.Tensor]:
    """Query, key and value of a rank."""
    return [torch.ones((B, n, length, D), dtype=dtype).requires_grad_() for n in (HEADS, kv_heads, kv_heads)]


def measure_traffic(world: World, kind: str, length: int, dtype: torch.dtype, kv_heads: int) -> tuple:
    meter = Meter()
    group = make_group(world, meter)
    leaves = local_query_key_value(length, dtype, kv_heads)
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
    by_rank = ranks(measure_traffic, size, "ring", length, dtype, KV_HEADS)
    for forward, backward, _ in by_rank:
        assert forward == (size - 1) * kv * dtype.itemsize
        assert backward == (size - 1) * kv * (dtype.itemsize + grads.itemsize)
    assert find_nccl_violations({rank: records for rank, (_, _, records) in enumerate(by_rank)}) == []


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (2, 1), (3, 2), (4, 12), (4, 6)])
def test_ulysses_sends_all_but_one_shard_of_a_ranks_tensors(ranks, size, kv_heads):
    length, dtype = 6, torch.float64
    repeated = kv_heads * size // gcd(kv_heads, size)
    elements = B * length * D * (HEADS + 2 * repeated + HEADS)  # query, key, value and output
    by_rank = ranks(measure_traffic, size, "ulysses", length, dtype, kv_heads)
    for forward, backward, records in by_rank:
        assert forward == backward == elements * dtype.itemsize * (size - 1) // size
        assert [record.name for record in records] == ["all_to_all"] * 4
    assert find_nccl_violations({rank: records for rank, (_, _, records) in enumerate(by_rank)}) == []


def record_events(world: World) -> tuple:
    meter = Meter()
    group = make_group(world, meter)
    for name in ("forward", "backward"):
        real = getattr(kernels, f"attention_{name}")

        def marked(*args, _real=real, _name=name):
            meter.add_event(_name)
            return _real(*args)

        setattr(kernels, f"attention_{name}", marked)
    ring.ring_attention(*local_query_key_value(4), group, "zigzag").sum().backward()
    return meter.records, meter.events


def test_each_hop_overlaps_the_attention_of_a_block(ranks):
    """By the order of events: all hops but the last of the gradients are in flight while a block is computed."""
    for records, events in ranks(record_events, 3):
        assert [label for _, label in events] == ["forward"] * 3 + ["backward"] * 3
        hops = {record.batch: record for record in records}
        assert len(hops) == 2 + 4
        meanwhile = [
            [label for tick, label in events if hop.launched < tick < hop.waited] for _, hop in sorted(hops.items())
        ]
        assert meanwhile == [["forward"]] * 2 + [["backward"]] * 3 + [[]]


def count_scores(world: World, layout: str, length: int) -> list:
    """Scores of every kernel call of a rank, forward and backward, from the shapes of the kernels' arguments."""
    group = make_group(world)
    calls = []
    for name in ("forward", "backward"):
        real = getattr(kernels, f"attention_{name}")

        def counting(*args, _real=real, _name=name):
            query, key = args[:2] if _name == "forward" else args[1:3]
            rectangle = query.shape[2] * key.shape[2]
            calls.append((_name, rectangle / 2 if args[-1] else rectangle))
            return _real(*args)

        setattr(kernels, f"attention_{name}", counting)
    ring.ring_attention(*local_query_key_value(length), group, layout).sum().backward()
    return [[scores for name, scores in calls if name == which] for which in ("forward", "backward")]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_scores_computed_match_the_formula(ranks, size, layout):
    length = 6
    for calls in zip(*ranks(count_scores, size, layout, length), strict=True):
        # Contiguous, the steps that a rank skips are its last.
        steps = [[per[step] if step < len(per) else 0 for per in calls] for step in range(size)]
        assert steps == scores_per_ring_step(layout, size, length)
        useful = Fraction(sum(map(sum, steps))) / (size * Fraction(sum(map(max, steps))))
        assert useful == (Fraction(size, 2 * size - 1) if layout == "contiguous" else 1)


class LiveBytes(TorchDispatchMode):
    """Peak bytes of the tensors created in this context, without the workspace of kernels."""

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


def measure_memory(world: World, layout: str, length: int) -> tuple:
    """Peak bytes of forward, of backward, and the bytes that autograd saves between them."""
    group = make_group(world)
    leaves = local_query_key_value(length)
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
def test_memory_depends_on_the_local_sequence_length_only(ranks, layout):
    own = 12
    small, large = ranks(measure_memory, 4, layout, own), ranks(measure_memory, 5, layout, own)
    assert set(large) == set(small), "more ranks with a longer sequence change the memory of a rank"
    twice = ranks(measure_memory, 4, layout, 2 * own)
    assert twice == [tuple(2 * n for n in each) for each in small], "memory is not linear in the local sequence length"
    query, kv, lse = B * HEADS * own * D * 8, 2 * B * KV_HEADS * own * D * 8, B * HEADS * own * 8
    for forward, backward, kept in small:
        assert kept == 2 * query + kv + lse  # query, output; key and value; log-sum-exp
        # Keys and values: this rank's block and two in flight. Outputs: the running one, the block's, both scaled
        # while they are merged, and their sum.
        assert forward <= 3 * kv + 5 * query + 6 * lse
        # Two blocks of keys and values, three of gradients and a share of them. Key and value, repeated for the kernel,
        # are as large as two queries, and so are their gradients; with the query's gradients (the block's and the sum)
        # that is six.
        assert backward <= 6 * kv + 6 * query + lse
