"""Estimated recomputation against real steps: saved bytes, peak bytes, FLOPs and messages."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minidist import recompute
from minidist.comm import World
from minidist.config import Config, TrainConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.transformer import Transformer
from minidist.tools.estimate import activations, saved_tensors
from minidist.tools.estimate.estimate import estimate
from minidist.tools.estimate.layout import plan_layout
from minidist.tools.parity.layouts import Layout, list_layouts
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
from tests.helpers.estimate_checks import assert_estimate_is_measured
from tests.helpers.estimate_checks import make_config as traffic_of
from tests.helpers.exhaustive import exhaustive


class Living(TorchDispatchMode):
    """Keeps weak references to the storages of all results of operations."""

    def __init__(self, known: set[int]):
        super().__init__()
        self._known = known  # addresses of parameters
        self._made: dict[int, tuple[StorageWeakRef, str, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                dtype = str(tensor.dtype).removeprefix("torch.")
                # A view has the storage of what it views, and that came first.
                known = self._made.get(storage._cdata)
                if storage.data_ptr() not in self._known and (known is None or known[0].expired()):
                    self._made[storage._cdata] = StorageWeakRef(storage), dtype, storage.nbytes()
        return out

    def now(self) -> Counter:
        """(dtype, bytes) of every storage that is still live."""
        return Counter((dtype, size) for reference, dtype, size in self._made.values() if not reference.expired())


def living(world: World, rows: list) -> list[Counter]:
    """The tensors that a forward saves on this rank, up to a loss with an autograd graph."""
    return [left_by(build_engine(world, config, dtype), samples) for config, dtype, samples in rows]


def left_by(engine, samples: int) -> Counter:
    batches = engine.forward_backward.shard_sequences([random_batch(samples, engine.model.config.vocab_size)])
    with Living({parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}) as made:
        loss = engine.forward_backward.forward_loss(0, batches[0])
        found = made.now()
    assert loss.grad_fn is not None
    engine.groups.destroy()
    return found


def counted(tensors: Counter) -> Counter:
    """Without tokens, labels and positions, which the batch has too, and without single numbers."""
    return Counter({(dtype, size): n for (dtype, size), n in tensors.items() if dtype != "int64" and size > 8})


def with_recomputation(config: Config, how: str) -> Config:
    return dataclasses.replace(config, recompute=how)


ROWS = {
    1: [
        (make_config({}), "float32", 3),
        (make_config({}, dropout=0.1, num_kv_heads=1), "float64", 1),
        (make_config({}, dropout=0.1), "bfloat16", 3),
    ],
    2: [
        (make_config({"tp": 2}, dropout=0.1), "float32", 3),
        (make_config({"tp": 2}, {"sequence": True}, dropout=0.1), "bfloat16", 2),
        (make_config({"cp": 2}), "float32", 3),
        (make_config({"cp": 2}, {"context": "ulysses"}, dropout=0.1), "float32", 3),
        (make_config({"cp": 2}, {"context": "ulysses"}, num_kv_heads=1), "float64", 1),
    ],
}


@pytest.mark.parametrize("world", ROWS)
@pytest.mark.parametrize("how", ["none", "block", "selective"])
def test_bytes_saved_by_a_forward_match_the_estimate(ranks, how, world):
    rows = [(with_recomputation(config, how), *rest) for config, *rest in ROWS[world]]
    for by_row in ranks(living, world, rows):
        for (config, dtype, samples), found in zip(rows, by_row, strict=True):
            wanted = estimate_saved_tensors(plan_layout(with_dtype(config, dtype), world), samples)
            assert counted(found) == counted(wanted), (config.mesh, config.parallel, dtype)


# -- at the peak ------------------------------------------------------------------------------------------------------


class Watch:
    """Sums the live storages whenever a tensor is saved, by autograd or for recomputation."""

    def __init__(self, engine):
        self._known = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._pipeline, self.most = engine.forward_backward.pipeline, 0

    def add_difference(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        # Tokens and labels are the batch's, however long a graph keeps them.
        if storage.data_ptr() not in self._known and tensor.dtype != torch.int64:
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        living = {at: size for at, (reference, size) in self._storages.items() if not reference.expired()}
        if self._pipeline is not None:
            halves = [half for of_one in self._pipeline._deferred.values() for half in of_one]
            waiting = [tensor.untyped_storage() for _, *two in halves for tensor in two]
            living |= {storage._cdata: storage.nbytes() for storage in waiting}
        self.most = max(self.most, sum(living.values()))

    def hooks(self, pack, unpack):
        def seeing(tensor):
            self.add_difference(tensor)
            return pack(tensor)

        return saved_tensors_hooks(seeing, unpack)

    def detached(self, args):
        if isinstance(args, torch.Tensor):
            self.add_difference(args)
        for part in args if isinstance(args, tuple) else ():
            self.detached(part)
        return DETACHED(args)


DETACHED = recompute._detached


def at_most(world: World, configs: list[Config]) -> list[int]:
    """The peak of live bytes on this rank in one step of each configuration."""
    found = []
    for config in configs:
        engine = build_engine(world, config, "float32")
        batches = [random_batch(samples, config.model.vocab_size) for samples in MICRO_BATCH_SIZES]
        watch = Watch(engine)
        recompute.saved_tensors_hooks, recompute._detached = watch.hooks, watch.detached  # in this rank's process
        try:
            with watch.hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
                engine.step(0, batches, lr=0.1)
        finally:
            recompute.saved_tensors_hooks, recompute._detached = saved_tensors_hooks, DETACHED
        found.append(watch.most)
        engine.groups.destroy()
    return found


def said(config: Config, world: int, stage: int, monkeypatch) -> int:
    """`peak_activation_bytes` without the batch's own tensors."""
    with monkeypatch.context() as patch:
        for name in ("saved_by_embedding", "saved_by_head"):
            described = getattr(saved_tensors, name)
            patch.setattr(
                saved_tensors, name, lambda layout, of=described: [t for t in of(layout) if t.dtype != "int64"]
            )
        return activations.peak_activation_bytes(plan_layout(config, world), stage, MICRO_BATCH_SIZES)


DEEP = {"num_layers": 5}
PEAKS = {
    1: [make_config({}, dropout=0.1, **DEEP), make_config({}, num_layers=1)],
    2: [
        make_config({"tp": 2}, {"sequence": True}, dropout=0.1, **DEEP),
        make_config({"cp": 2}, **DEEP),
        make_config({"cp": 2}, {"context": "ulysses"}, **DEEP),
        *(
            pipeline_config(schedule, tie_embeddings=schedule != "1f1b")
            for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v")
        ),
    ],
}


@pytest.mark.parametrize(
    ("how", "world"), [("selective", 1), ("block", 2), *exhaustive(("block", 1), ("selective", 2))]
)
def test_live_bytes_never_exceed_the_estimate(ranks, monkeypatch, how, world):
    configs = [with_recomputation(config, how) for config in PEAKS[world]]
    for rank, found in enumerate(ranks(at_most, world, configs)):
        for config, most in zip(configs, found, strict=True):
            stage = rank if config.mesh.pp > 1 else 0
            assert most == said(config, world, stage, monkeypatch), (config.mesh, config.parallel)


def test_block_recomputation_saves_block_inputs_only(ranks):
    config = make_config({}, **DEEP)
    (none,), (block,) = (
        ranks(living, 1, [(with_recomputation(config, how), "float32", 3)]) for how in ("none", "block")
    )
    bytes_of = [sum(size * count for (_, size), count in found.items()) for (found,) in (none, block)]
    assert bytes_of[1] < bytes_of[0] / 5


# -- computed and sent again ------------------------------------------------------------------------------------------


def flops_of_a_step(config: Config) -> int:
    """The FLOPs of a step, counted operation by operation."""

    def attention(query, key, *_, out_shape=None, **__):
        b, heads, s, d = query
        return 2 * 2 * b * heads * s * s * d

    aten = torch.ops.aten
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    counted = {kernel: attention, backward: lambda _, *args, **more: 2 * attention(*args, **more)}
    model = Transformer(config.model)
    recompute.apply_recomputation(model, config.recompute)
    tokens, samples = torch.zeros((2, SEQ_LEN), dtype=torch.int64), torch.arange(2)
    address = DropoutAddress(1, 0, samples, torch.arange(SEQ_LEN))
    with FlopCounterMode(display=False, custom_mapping=counted) as counter:
        model(tokens, tokens, address=address)[0].backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("how", ["none", "block", "selective"])
def test_hardware_flops_match_counted_flops(how, dropout):
    config = with_recomputation(make_config({}, num_layers=3, dropout=dropout), how)
    (cost,) = estimate(dataclasses.replace(config, train=TrainConfig(global_batch=2)), 1).ranks
    # The estimate is of 6 per parameter; the weights of norms, 7 times 32 for 3 layers, are in no matrix.
    norms = 6 * 7 * MODEL["hidden_size"] * 2 * SEQ_LEN
    assert flops_of_a_step(config) == cost.hardware_flops - norms
    assert (cost.hardware_flops > cost.flops) == (how != "none")


def test_recomputation_repeats_the_messages_inside_it(ranks):
    two = [layout for layout in list_layouts(2) if layout.dp == 1 and layout.schedule in (None, "1f1b", "zb-v")]
    how = [("block", 0.0), ("block", 0.1), ("selective", 0.0)]
    configs = [traffic_of(layout, 2, recompute=kind, dropout=dropout) for layout in two for kind, dropout in how]
    assert_estimate_is_measured(ranks, 2, configs)
    four = [Layout(cp=2, tp=2, context="ulysses", sequence=True), Layout(cp=2, tp=2, context="ring", sequence=False)]
    assert_estimate_is_measured(
        ranks, 4, [traffic_of(layout, 4, recompute=kind, dropout=dropout) for layout in four for kind, dropout in how]
    )
