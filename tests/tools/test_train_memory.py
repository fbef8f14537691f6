"""The peak of a rank's tensors is exact, and so is what it consists of: that of an engine is the estimate's."""

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
from minidist.tools.memory.breakdown import PeakByKind, measure_peak, tensors_by_kind
from minidist.tools.memory.storages import StoragePeak, shared_segment_bytes
from tests.helpers.activation_cases import batch_of, configured, engine_of

MIB = 2**20


def filled(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_the_peak_is_what_was_live_at_one_time_after_the_mark():
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


def test_without_a_mark_all_of_it_counts():
    with StoragePeak() as peak:
        one = filled(3)
        del one
    assert peak.bytes == 3 * MIB


# -- kinds ------------------------------------------------------------------------------------------------------------


def test_what_is_named_counts_where_it_was_there_before():
    weights, states = filled(2), filled(3)
    with PeakByKind(lambda: {"weights": [weights[: MIB // 2]], "states": [states, None]}) as found:
        work = filled(4)
        del work
    assert found.peak.breakdown == {"weights": 2 * MIB, "states": 3 * MIB, "buffers": 4 * MIB}
    assert found.peak.total == 9 * MIB and found.peak.allocator_peak is None


def test_the_parts_are_those_of_the_peak_and_the_largest_those_of_each():
    held = {"a": [], "b": []}
    with PeakByKind(lambda: held) as found:
        held["a"].append(filled(5))
        found.scan()
        held["a"].clear()
        held["b"].append(filled(4))
        other = filled(3)
        found.scan()
        del other
        held["b"].clear()
    assert found.peak.total == 7 * MIB and found.peak.breakdown == {"b": 4 * MIB, "buffers": 3 * MIB}
    assert found.peak.peak_by_kind == {"a": 5 * MIB, "b": 4 * MIB, "buffers": 3 * MIB}


def test_a_storage_is_of_the_first_kind_that_names_it_from_its_first_moment():
    tensors = []
    with PeakByKind(lambda: {"first": tensors, "second": tensors}) as found:
        made = filled(2)
        other = filled(6)
        del other  # the peak, before anybody has said what `made` is
        tensors.append(made)
    assert found.peak.breakdown == {"first": 2 * MIB, "buffers": 6 * MIB}


def test_a_storage_that_is_emptied_and_filled_again_keeps_its_kind():
    rows = []
    with PeakByKind(lambda: {"parameters": rows}) as found:
        rows.append(filled(4))
        found.reset_peak()
        storage = rows[0].untyped_storage()
        storage.resize_(0)
        elsewhere = filled(3)
        storage.resize_(5 * MIB)
        found.scan()
        del elsewhere
    assert found.peak.breakdown == {"parameters": 5 * MIB, "buffers": 3 * MIB}


def test_the_end_of_what_was_there_before_is_seen_by_looking():
    held = [filled(4), filled(1)]
    with PeakByKind(lambda: {"a": held}) as found:
        held.pop(0)
        found.scan()
        found.reset_peak()
        other = filled(2)
        del other
    assert found.peak.breakdown == {"a": MIB, "buffers": 2 * MIB}


def test_what_was_there_before_and_is_kept_again_is_activations():
    table = torch.ones(256, 256)  # as rotary tables, kept by every forward
    weight = torch.ones(256, 256, requires_grad=True)
    found = measure_peak(lambda: (table * weight).sum().backward(), lambda: {"parameters": [weight]})
    assert found.peak_by_kind["activations"] == MIB // 4


def test_an_address_that_is_used_again_may_be_another_kind():
    held = {"a": []}
    with PeakByKind(lambda: held) as found:
        for _ in range(3):
            held["a"].append(filled(1))
            found.scan()
            held["a"].clear()
            gone = filled(1)
            found.scan()
            del gone
    assert found.peak.peak_by_kind == {"a": MIB, "buffers": MIB}


def test_what_autograd_keeps_is_activations_and_no_longer_than_it_keeps_it():
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


def test_it_stays_what_it_was_first():
    held = {"a": [filled(2)], "b": []}
    with PeakByKind(lambda: held) as found:
        held["b"].append(held["a"].pop())
        found.scan()
    assert found.peak.breakdown == {"a": 2 * MIB}


def test_parameters_that_are_gathered_for_each_use_are_parameters_in_every_life():
    """As in stage 3: a row that is emptied after forward, and after backward, and filled again before either."""
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


def test_what_is_never_used_backward_is_freed():
    with PeakByKind(dict):
        kept = torch.ones(8, requires_grad=True).sigmoid()  # keeps what it gives
        alive = weakref.ref(kept)
        del kept
        assert alive() is None


def test_what_fails_inside_is_what_is_seen_and_nobody_looks_any_more():
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
    """The peak of a second step, and the same by the instrument that asks for no kinds, of all that was allocated."""
    with StoragePeak() as everything:
        engine = engine_of(world, config, "float32")
        engine.step(0, [batch_of(SAMPLES, config.model.vocab_size)], lr=0.1)
        everything.reset_peak()
        engine.step(1, [batch_of(SAMPLES, config.model.vocab_size)], lr=0.1)
    engine.groups.destroy()
    del engine
    gc.collect()
    engine = engine_of(world, config, "float32")
    engine.step(0, [batch_of(SAMPLES, config.model.vocab_size)], lr=0.1)

    def step():
        engine.step(1, [batch_of(SAMPLES, config.model.vocab_size)], lr=0.1)

    found = measure_peak(step, tensors_by_kind(engine.model, engine.optimizer))
    engine.groups.destroy()
    return found, everything.bytes


CASES = [
    (1, configured({})),
    (1, configured({}, dropout=0.1, tie_embeddings=False)),
    (2, configured({"dp": 2})),
    (2, configured({"tp": 2}, {"sequence": True})),
    (2, configured({"cp": 2})),
]


@pytest.mark.parametrize(("world", "config"), CASES)
def test_each_kind_of_an_engine_takes_what_the_estimate_says(ranks, world, config):
    batch = dataclasses.replace(config.train, global_batch=SAMPLES * config.mesh.dp)
    said = estimate(dataclasses.replace(config, train=batch), world).ranks
    for rank, (found, everything) in zip(said, ranks(of_a_step, world, config), strict=True):
        assert found.peak_by_kind["parameters"] == rank.parameter_bytes
        assert found.peak_by_kind["states"] == rank.optimizer_bytes
        assert found.peak_by_kind["gradients"] == rank.gradient_bytes
        assert found.peak_by_kind["activations"] == rank.activation_bytes
        assert found.total == sum(found.breakdown.values())
        # All that was allocated since before there was an engine: beside it the batch's sample numbers, a few scalars,
        # and the batch before, until it is replaced.
        inputs = 4 * SAMPLES * (24 + 24 + 1) * 8
        assert found.total <= everything <= found.total + inputs
