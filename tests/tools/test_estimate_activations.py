"""Estimated activations against real runs: the saved tensors, and the live bytes over a step."""

from collections import Counter

import pytest
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from minidist.comm import World
from minidist.config import Config
from minidist.tools.estimate import activations, saved_tensors
from minidist.tools.estimate.estimate import estimate
from minidist.tools.estimate.layout import plan_layout
from minidist.train.engine import Engine
from tests.helpers.activation_cases import (
    MICRO_BATCH_SIZES,
    MODEL,
    SEQ_LEN,
    build_engine,
    estimate_saved_tensors,
    make_config,
    pipeline_config,
    random_batch,
    with_dtype,
)


def storages_saved(world: World, rows: list) -> list[Counter]:
    """(dtype, bytes) of every storage, except parameters', that a forward saves on this rank."""
    return [saved_by(build_engine(world, config, dtype), samples) for config, dtype, samples in rows]


def saved_by(engine: Engine, samples: int) -> Counter:
    parameters = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            # A view may be of another dtype in name only: what is kept is the storage, and `tensor` holds it.
            found.setdefault(storage.data_ptr(), (str(tensor.dtype).removeprefix("torch."), storage.nbytes(), tensor))
        return tensor

    batches = engine.forward_backward.shard_sequences([random_batch(samples, engine.model.config.vocab_size)])
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine.forward_backward.forward_loss(0, batches[0])
    assert loss.isfinite()
    engine.groups.destroy()
    return Counter((dtype, size) for dtype, size, _ in found.values())


ALONE = [
    (make_config({}), "float32", 3),
    (make_config({}, tie_embeddings=False, num_kv_heads=4), "float32", 3),
    (make_config({}, dropout=0.1, num_kv_heads=1), "float32", 1),
    (make_config({}, num_layers=3, num_heads=8), "float64", 2),
    (make_config({}, dropout=0.1), "bfloat16", 3),
]
TWO = [
    (make_config({"tp": 2}, dropout=0.1), "float32", 3),
    (make_config({"tp": 2}, num_kv_heads=1, tie_embeddings=False), "float64", 1),
    (make_config({"tp": 2}, {"sequence": True}, dropout=0.1), "float32", 3),
    (make_config({"tp": 2}, {"sequence": True}), "bfloat16", 1),
    (make_config({"cp": 2}, dropout=0.1), "float32", 3),
    (make_config({"cp": 2}, num_kv_heads=4), "bfloat16", 2),
    (make_config({"cp": 2}, {"context": "ulysses"}, dropout=0.1), "float32", 3),
    (make_config({"cp": 2}, {"context": "ulysses"}, num_kv_heads=1), "float64", 1),
]
FOUR = [
    (make_config({"cp": 2, "tp": 2}, {"sequence": True}), "float32", 3),
    (make_config({"cp": 2, "tp": 2}, {"sequence": True, "context": "ulysses"}, num_kv_heads=1), "float32", 2),
    (make_config({"tp": 4}, {"sequence": True}, dropout=0.1), "float64", 2),
    (make_config({"cp": 4}), "float32", 2),
]


@pytest.mark.parametrize("world, rows", [(1, ALONE), (2, TWO), (4, FOUR)], ids=[1, 2, 4])
def test_estimated_tensors_are_those_that_autograd_saves(ranks, world, rows):
    for by_row in ranks(storages_saved, world, rows):
        for (config, dtype, samples), found in zip(rows, by_row, strict=True):
            assert found == estimate_saved_tensors(plan_layout(with_dtype(config, dtype), world), samples), (
                config.mesh,
                config.parallel,
                dtype,
            )


# -- alive at one time ------------------------------------------------------------------------------------------------


def alive(world: World, configs: list[Config]) -> list[tuple[int, int, int]]:
    """The most bytes alive in a step that were saved; with the gradients that weight halves wait with; the executor's
    own count of micro-batches."""
    results = []
    for config in configs:
        engine = build_engine(world, config, "float32")
        batches = [random_batch(samples, config.model.vocab_size) for samples in MICRO_BATCH_SIZES]
        inputs = [tensor for batch in batches for tensor in (batch.tokens, batch.labels)]
        watch = Watch({t.untyped_storage().data_ptr() for t in (*inputs, *engine.model.parameters())}, engine)
        with saved_tensors_hooks(watch.pack, lambda tensor: tensor):
            engine.step(0, batches, lr=0.1)
        results.append((watch.saved, watch.all, engine.forward_backward.pipeline.peak_live))
        engine.groups.destroy()
    return results


class Watch:
    """Sums the live saved storages whenever a tensor is saved. known: addresses of storages that do not count."""

    def __init__(self, known: set[int], engine: Engine):
        self._known, self._table = known, (SEQ_LEN, 1, engine.model.config.head_dim)
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._pipeline = engine.forward_backward.pipeline
        self.saved = self.all = 0

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known and tensor.shape != self._table:
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        living = {at: size for at, (reference, size) in self._storages.items() if not reference.expired()}
        self.saved = max(self.saved, sum(living.values()))
        waiting = [
            t.untyped_storage() for halves in self._pipeline._deferred.values() for _, *two in halves for t in two
        ]
        living |= {storage._cdata: storage.nbytes() for storage in waiting}
        self.all = max(self.all, sum(living.values()))
        return tensor.detach()


# What lives on by itself: the batch, and the tables that all micro-batches share.
CONSTANT = ("tokens", "labels", "cos", "sin")


def predicted(config: Config, stage: int, monkeypatch) -> int:
    """`peak_activation_bytes` without the batch and the rotary tables."""
    layout = plan_layout(config, 2)
    with monkeypatch.context() as patch:
        for name in ("rotary_tables", "saved_by_embedding", "saved_by_head"):
            patch.setattr(saved_tensors, name, without_constants(getattr(saved_tensors, name)))
        return activations.peak_activation_bytes(layout, stage, MICRO_BATCH_SIZES)


def without_constants(described):
    return lambda layout: [each for each in described(layout) if each.name not in CONSTANT]


def test_live_activation_bytes_match_the_schedule(ranks, monkeypatch):
    configs = [pipeline_config(kind, tie_embeddings=kind != "gpipe") for kind in ("gpipe", "1f1b", "interleaved")]
    for stage, found in enumerate(ranks(alive, 2, configs)):
        for config, (most, _, live) in zip(configs, found, strict=True):
            assert most == predicted(config, stage, monkeypatch), (stage, config.parallel.schedule)
            assert live == estimate(config, 2).pipeline.peak_live_micro_batches[stage]


def test_inputs_of_weight_gradients_stay_live_between_b_and_w(ranks, monkeypatch):
    configs = [pipeline_config(kind) for kind in ("zb-h1", "zb-h2", "zb-v")]
    for stage, found in enumerate(ranks(alive, 2, configs)):
        for config, (_, both, live) in zip(configs, found, strict=True):
            assert both == predicted(config, stage, monkeypatch), (stage, config.parallel.schedule)
            assert live == estimate(config, 2).pipeline.peak_live_micro_batches[stage]


def test_tables_count_once_and_accumulation_keeps_one_micro_batch_at_a_time():
    layout = plan_layout(pipeline_config("gpipe"), 2)
    tables = 2 * SEQ_LEN * MODEL["hidden_size"] // MODEL["num_heads"] * 4  # cos and sin, float32
    one = activations.local_tensor_bytes(layout, activations.saved_by_chunk(layout, layout.stage_chunks(0)[0]), 2)
    assert activations.peak_activation_bytes(layout, 0, [2, 2, 2, 2]) == tables + 4 * (one - tables)
    alone = plan_layout(make_config({}), 1)
    largest = activations.local_tensor_bytes(alone, activations.saved_by_chunk(alone, alone.model_chunks[0]), 3)
    assert activations.peak_activation_bytes(alone, 0, [2, 3, 2]) == largest
