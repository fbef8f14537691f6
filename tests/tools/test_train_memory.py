"""The measured peak of a rank's tensors is exact by category, and matches the estimate for engines."""

import dataclasses
import gc
import mmap
import os
import sys
import weakref

import pytest
import torch

from minidist.comm import World
from minidist.config import Config
from minidist.tools.estimate.estimate import estimate
from minidist.tools.memory.breakdown import PeakByKind, make_tensor_lister, measure_peak
from minidist.tools.memory.storages import StoragePeak, shared_segment_bytes
from tests.helpers.activation_cases import build_engine, make_config, random_batch

MIB = 2**20


def filled(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_the_peak_counts_storages_live_at_one_time_after_the_mark():
    with StoragePeak() as peak:
        kept = torch.empty(MIB, dtype=torch.uint8)
        before = torch.empty(50 * MIB, dtype=torch.uint8)
        del before
        peak.reset_peak()
        for _ in range(2):  # never both at once
            one = torch.empty(3 * MIB, dtype=torch.uint8)
            del one
        two = torch.empty(2 * MIB, dtype=torch.uint8)
    assert peak.bytes == 4 * MIB
    del kept, two


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_mapped_segments_are_seen():
    before = shared_segment_bytes()
    fd = os.memfd_create("memory-test")
    os.ftruncate(fd, MIB)
    with mmap.mmap(fd, MIB) as segment:
        segment.write(b"x" * MIB)
        assert shared_segment_bytes() - before == MIB  # mapped once, so all of it is ours
    os.close(fd)


def test_without_a_mark_the_full_time_counts():
    with StoragePeak() as peak:
        one = filled(3)
        del one
    assert peak.bytes == 3 * MIB


# -- kinds ------------------------------------------------------------------------------------------------------------


def test_named_storages_count_even_if_allocated_earlier():
    weights, states = filled(2), filled(3)
    with PeakByKind(lambda: {"weights": [weights[: MIB // 2]], "states": [states, None]}) as found:
        work = filled(4)
        del work
    assert found.peak.breakdown == {"weights": 2 * MIB, "states": 3 * MIB, "buffers": 4 * MIB}
    assert found.peak.total == 9 * MIB and found.peak.allocator_peak is None


def test_categories_at_the_peak_and_their_own_peaks():
    held = {"a": [], "b": []}
    with PeakByKind(lambda: held) as found:
        held["a"].append(filled(5))
        found.label_live_tensors()
        held["a"].clear()
        held["b"].append(filled(4))
        other = filled(3)
        found.label_live_tensors()
        del other
        held["b"].clear()
    assert found.peak.total == 7 * MIB and found.peak.breakdown == {"b": 4 * MIB, "buffers": 3 * MIB}
    assert found.peak.peak_by_kind == {"a": 5 * MIB, "b": 4 * MIB, "buffers": 3 * MIB}


def test_a_storage_belongs_to_the_first_category_that_names_it():
    tensors = []
    with PeakByKind(lambda: {"first": tensors, "second": tensors}) as found:
        made = filled(2)
        other = filled(6)
        del other  # the peak, before anybody has said what `made` is
        tensors.append(made)
    assert found.peak.breakdown == {"first": 2 * MIB, "buffers": 6 * MIB}


def test_a_resized_storage_keeps_its_category():
    rows = []
    with PeakByKind(lambda: {"parameters": rows}) as found:
        rows.append(filled(4))
        found.reset_peak()
        storage = rows[0].untyped_storage()
        storage.resize_(0)
        elsewhere = filled(3)
        storage.resize_(5 * MIB)
        found.label_live_tensors()
        del elsewhere
    assert found.peak.breakdown == {"parameters": 5 * MIB, "buffers": 3 * MIB}


def test_frees_of_earlier_storages_are_found_by_polling():
    held = [filled(4), filled(1)]
    with PeakByKind(lambda: {"a": held}) as found:
        held.pop(0)
        found.label_live_tensors()
        found.reset_peak()
        other = filled(2)
        del other
    assert found.peak.breakdown == {"a": MIB, "buffers": 2 * MIB}


def test_earlier_storages_saved_by_autograd_are_activations():
    table = torch.ones(256, 256)  # as rotary tables, kept by every forward
    weight = torch.ones(256, 256, requires_grad=True)
    found = measure_peak(lambda: (table * weight).sum().backward(), lambda: {"parameters": [weight]})
    assert found.peak_by_kind["activations"] == MIB // 4


def test_a_reused_address_may_have_another_category():
    held = {"a": []}
    with PeakByKind(lambda: held) as found:
        for _ in range(3):
            held["a"].append(filled(1))
            found.label_live_tensors()
            held["a"].clear()
            gone = filled(1)
            found.label_live_tensors()
            del gone
    assert found.peak.peak_by_kind == {"a": MIB, "buffers": MIB}


def test_storages_are_activations_while_autograd_saves_them():
    weight = torch.zeros(256, 256, requires_grad=True)
    known = {"parameters": [weight]}

    def kinds():
        return known | {"gradients": [weight.grad]}

    def step():
        hidden = torch.ones(1024, 256)
        for _ in range(2):
            hidden = (hidden @ weight).sigmoid()  # keeps its input, and what it gives
        alive = weakref.ref(hidden)
        hidden.sum().backward()
        del hidden
        gc.collect()
        assert alive() is None

    found = measure_peak(step, kinds)
    assert found.peak_by_kind["activations"] == 3 * MIB and found.peak_by_kind["parameters"] == MIB // 4
    assert found.breakdown["activations"] == 3 * MIB
    assert found.peak_by_kind["gradients"] == MIB // 4 == weight.grad.untyped_storage().nbytes()
    assert found.total == sum(found.breakdown.values())


def test_a_storage_keeps_its_first_category():
    held = {"a": [filled(2)], "b": []}
    with PeakByKind(lambda: held) as found:
        held["b"].append(held["a"].pop())
        found.label_live_tensors()
    assert found.peak.breakdown == {"a": 2 * MIB}


def test_gathered_parameters_are_parameters_after_every_gather():
    """As in stage 3: a flat buffer that is freed after forward and backward, and gathered before either."""
    rows = []
    with PeakByKind(lambda: {"parameters": rows}) as found:
        row = torch.ones(512, 512)
        weight = row.requires_grad_()
        rows.append(weight)
        storage = row.untyped_storage()
        storage.resize_(0)
        found.reset_peak()
        storage.resize_(MIB)
        loss = (weight * weight.detach()).sum()
        storage.resize_(0)
        storage.resize_(2 * MIB)  # a life of its own, as its size shows
        loss.backward()
        storage.resize_(0)
        weight.grad = None
    assert found.peak.peak_by_kind["parameters"] == 2 * MIB and "activations" not in found.peak.peak_by_kind


def test_saved_tensors_never_used_in_backward_are_freed():
    with PeakByKind(dict):
        kept = torch.ones(8, requires_grad=True).sigmoid()  # keeps what it gives
        alive = weakref.ref(kept)
        del kept
        assert alive() is None


def test_an_exception_inside_propagates_and_ends_the_tracking():
    looked = []

    def kinds():
        looked.append(1)
        return {}

    with pytest.raises(ZeroDivisionError), PeakByKind(kinds):
        _ = 1 / 0
    before = len(looked)
    weight = torch.ones(2, requires_grad=True)
    (weight * weight).sum().backward()
    torch.optim.SGD([weight], 0.1).step()
    assert len(looked) == before > 0


# -- an engine --------------------------------------------------------------------------------------------------------

SAMPLES = 3


def of_a_step(world: World, config: Config):
    """The peak of a second step by category, and the total peak of all allocations."""
    with StoragePeak() as everything:
        engine = build_engine(world, config, "float32")
        engine.step(0, [random_batch(SAMPLES, config.model.vocab_size)], lr=0.1)
        everything.reset_peak()
        engine.step(1, [random_batch(SAMPLES, config.model.vocab_size)], lr=0.1)
    engine.groups.destroy()
    del engine
    gc.collect()
    engine = build_engine(world, config, "float32")
    engine.step(0, [random_batch(SAMPLES, config.model.vocab_size)], lr=0.1)

    def step():
        engine.step(1, [random_batch(SAMPLES, config.model.vocab_size)], lr=0.1)

    found = measure_peak(step, make_tensor_lister(engine.model, engine.optimizer))
    engine.groups.destroy()
    return found, everything.bytes


CASES = [
    (1, make_config({})),
    (1, make_config({}, dropout=0.1, tie_embeddings=False)),
    (2, make_config({"dp": 2})),
    (2, make_config({"tp": 2}, {"sequence": True})),
    (2, make_config({"cp": 2})),
]


@pytest.mark.parametrize(("world", "config"), CASES)
def test_memory_by_category_of_a_step_matches_the_estimate(ranks, world, config):
    batch = dataclasses.replace(config.train, global_batch=SAMPLES * config.mesh.dp)
    message = estimate(dataclasses.replace(config, train=batch), world).ranks
    for rank, (found, everything) in zip(message, ranks(of_a_step, world, config), strict=True):
        assert found.peak_by_kind["parameters"] == rank.parameter_bytes
        assert found.peak_by_kind["states"] == rank.optimizer_bytes
        assert found.peak_by_kind["gradients"] == rank.gradient_bytes
        assert found.peak_by_kind["activations"] == rank.activation_bytes
        assert found.total == sum(found.breakdown.values())
        # All that was allocated since before there was an engine: beside it the batch's sample numbers, a few scalars,
        # and the batch before, until it is replaced.
        inputs = 4 * SAMPLES * (24 + 24 + 1) * 8
        assert found.total <= everything <= found.total + inputs
