"""Activations: the tensors described are those that real runs save, and as many are alive as the executor keeps."""

from collections import Counter

import pytest
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from minidist.comm import World
from minidist.config import Config
from minidist.tools.estimate import activations, saved_tensors
from minidist.tools.estimate.estimate import estimate
from minidist.tools.estimate.layout import layout_of
from minidist.train.engine import Engine
from tests.helpers.activation_cases import (
    MODEL,
    SAMPLES,
    SEQ_LEN,
    batch_of,
    configured,
    described,
    engine_of,
    in_format,
    piped,
)


def saved(world: World, rows: list) -> list[Counter]:
    """(dtype, bytes) of every storage that a forward saves and that is no parameter's, on this rank."""
    return [saved_by(engine_of(world, config, dtype), samples) for config, dtype, samples in rows]


def saved_by(engine: Engine, samples: int) -> Counter:
    parameters = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            # A view may be of another dtype in name only: what is kept is the storage, and `tensor` holds it.
            found.setdefault(storage.data_ptr(), (str(tensor.dtype).removeprefix("torch."), storage.nbytes(), tensor))
        return tensor

    batches = engine.forward_backward.cut_sequences([batch_of(samples, engine.model.config.vocab_size)])
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine.forward_backward.loss_sum(0, batches[0])
    assert loss.isfinite()
    engine.groups.destroy()
    return Counter((dtype, size) for dtype, size, _ in found.values())


ALONE = [
    (configured({}), "float32", 3),
    (configured({}, tie_embeddings=False, num_kv_heads=4), "float32", 3),
    (configured({}, dropout=0.1, num_kv_heads=1), "float32", 1),
    (configured({}, num_layers=3, num_heads=8), "float64", 2),
    (configured({}, dropout=0.1), "bfloat16", 3),
]
TWO = [
    (configured({"tp": 2}, dropout=0.1), "float32", 3),
    (configured({"tp": 2}, num_kv_heads=1, tie_embeddings=False), "float64", 1),
    (configured({"tp": 2}, {"sequence": True}, dropout=0.1), "float32", 3),
    (configured({"tp": 2}, {"sequence": True}), "bfloat16", 1),
    (configured({"cp": 2}, dropout=0.1), "float32", 3),
    (configured({"cp": 2}, num_kv_heads=4), "bfloat16", 2),
    (configured({"cp": 2}, {"context": "ulysses"}, dropout=0.1), "float32", 3),
    (configured({"cp": 2}, {"context": "ulysses"}, num_kv_heads=1), "float64", 1),
]
FOUR = [
    (configured({"cp": 2, "tp": 2}, {"sequence": True}), "float32", 3),
    (configured({"cp": 2, "tp": 2}, {"sequence": True, "context": "ulysses"}, num_kv_heads=1), "float32", 2),
    (configured({"tp": 4}, {"sequence": True}, dropout=0.1), "float64", 2),
    (configured({"cp": 4}), "float32", 2),
]


@pytest.mark.parametrize("world, rows", [(1, ALONE), (2, TWO), (4, FOUR)], ids=[1, 2, 4])
def test_the_tensors_described_are_those_that_are_saved(ranks, world, rows):
    for by_row in ranks(saved, world, rows):
        for (config, dtype, samples), found in zip(rows, by_row, strict=True):
            assert found == described(layout_of(in_format(config, dtype), world), samples), (
                config.mesh,
                config.parallel,
                dtype,
            )


# -- alive at one time ------------------------------------------------------------------------------------------------


def alive(world: World, configs: list[Config]) -> list[tuple[int, int, int]]:
    """The most bytes alive in a step that were saved; with the gradients that weight halves wait with; the executor's
    own count of micro-batches."""
    found = []
    for config in configs:
        engine = engine_of(world, config, "float32")
        batches = [batch_of(samples, config.model.vocab_size) for samples in SAMPLES]
        inputs = [tensor for batch in batches for tensor in (batch.tokens, batch.labels)]
        watch = Watch({t.untyped_storage().data_ptr() for t in (*inputs, *engine.model.parameters())}, engine)
        with saved_tensors_hooks(watch.pack, lambda tensor: tensor):
            engine.step(0, batches, lr=0.1)
        found.append((watch.saved, watch.all, engine.forward_backward.pipeline.peak_live))
        engine.groups.destroy()
    return found


class Watch:
    """Looks, whenever a tensor is saved, at which storages are alive. known: addresses of those that do not count."""

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
        waiting = [t.untyped_storage() for halves in self._pipeline._halves.values() for _, *two in halves for t in two]
        living |= {storage._cdata: storage.nbytes() for storage in waiting}
        self.all = max(self.all, sum(living.values()))
        return tensor.detach()


# What lives on by itself: the batch, and the tables that all micro-batches share.
CONSTANT = ("tokens", "labels", "cos", "sin")


def predicted(config: Config, stage: int, monkeypatch) -> int:
    """`peak_activation_bytes` without the batch and the rotary tables."""
    layout = layout_of(config, 2)
    with monkeypatch.context() as patch:
        for name in ("rotary_tables", "saved_by_embedding", "saved_by_head"):
            patch.setattr(saved_tensors, name, without_constants(getattr(saved_tensors, name)))
        return activations.peak_activation_bytes(layout, stage, SAMPLES)


def without_constants(described):
    return lambda layout: [each for each in described(layout) if each.name not in CONSTANT]


def test_as_many_bytes_are_alive_as_the_schedule_says(ranks, monkeypatch):
    configs = [piped(kind, tie_embeddings=kind != "gpipe") for kind in ("gpipe", "1f1b", "interleaved")]
    for stage, found in enumerate(ranks(alive, 2, configs)):
        for config, (most, _, live) in zip(configs, found, strict=True):
            assert most == predicted(config, stage, monkeypatch), (stage, config.parallel.schedule)
            assert live == estimate(config, 2).pipeline.peak_live[stage]


def test_between_the_halves_of_a_backward_lives_what_weight_gradients_are_made_of(ranks, monkeypatch):
    configs = [piped(kind) for kind in ("zb-h1", "zb-h2", "zb-v")]
    for stage, found in enumerate(ranks(alive, 2, configs)):
        for config, (_, both, live) in zip(configs, found, strict=True):
            assert both == predicted(config, stage, monkeypatch), (stage, config.parallel.schedule)
            assert live == estimate(config, 2).pipeline.peak_live[stage]


def test_tables_count_once_and_accumulation_keeps_one_micro_batch_at_a_time():
    layout = layout_of(piped("gpipe"), 2)
    tables = 2 * SEQ_LEN * MODEL["hidden_size"] // MODEL["num_heads"] * 4  # cos and sin, float32
    one = activations.local_bytes(layout, activations.saved_by_chunk(layout, layout.chunks(0)[0]), 2)
    assert activations.peak_activation_bytes(layout, 0, [2, 2, 2, 2]) == tables + 4 * (one - tables)
    alone = layout_of(configured({}), 1)
    largest = activations.local_bytes(alone, activations.saved_by_chunk(alone, alone.model_chunks[0]), 3)
    assert activations.peak_activation_bytes(alone, 0, [2, 3, 2]) == largest
