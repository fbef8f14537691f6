"""Context parallelism against one process in float64: attention, then full models, with every gradient."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.labels import IGNORE_INDEX
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.init import init_parameters
from minidist.models.layers import Attention
from minidist.models.transformer import Transformer
from minidist.parallel.context import simple
from minidist.parallel.context.layout import rank_positions, shard_sequence
from minidist.parallel.context.ring import ring_attention
from minidist.parallel.context.split import apply_context_parallel
from minidist.parallel.context.ulysses import ulysses_attention
from minidist.parallel.tensor.split import apply_tensor_parallel
from minidist.parameters import named_parameters
from minidist.tools.deadlock.nccl_rules import find_nccl_violations
from tests.helpers.exhaustive import exhaustive

FORMS = [(kind, layout) for kind in ("ring", "ulysses") for layout in ("zigzag", "contiguous")]
by_form = pytest.mark.parametrize(("kind", "layout"), FORMS)
APPLY = {"fast": apply_context_parallel, "simple": simple.apply_context_parallel}
ATTENTION = {"fast": (ring_attention, ulysses_attention), "simple": (simple.ring_attention, simple.ulysses_attention)}
both_versions = pytest.mark.parametrize("version", APPLY)

# batch, query heads, key and value heads, sequence, features of a head
SHAPES = [(2, 12, 12, 48, 4), (1, 12, 4, 24, 5), (2, 12, 2, 24, 3), (3, 12, 1, 24, 2), (0, 12, 3, 24, 2)]


def random_tensor(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_inputs(shape: tuple) -> tuple:
    """Unsharded query, key, value and output gradient. Large queries make the softmax far from uniform."""
    b, heads, kv_heads, s, d = shape
    sizes = [(b, heads, s, d), (b, kv_heads, s, d), (b, kv_heads, s, d), (b, heads, s, d)]
    query, *others = (random_tensor(*size, seed=seed) for seed, size in enumerate(sizes))
    return 3 * query, *others


def reference_attention(shape: tuple) -> list:
    """Output and gradients by plain softmax with a mask."""
    query, key, value, grad = make_inputs(shape)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    group = shape[1] // shape[2]
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(group, 1)) / shape[4] ** 0.5
    future = torch.arange(shape[3])[None, :] > torch.arange(shape[3])[:, None]
    weights = torch.softmax(scores.masked_fill(future, -torch.inf), -1)
    out = torch.einsum("bhqk,bhkd->bhqd", weights, value.repeat_interleave(group, 1))
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def make_attention(version: str, kind: str, layout: str, group):
    ring, ulysses = ATTENTION[version]
    if kind == "ring":
        return partial(ring, group=group, layout=layout)
    return partial(ulysses, attend=partial(Attention.attend, None), group=group, layout=layout)


def run_attention(world: World, version: str, kind: str, layout: str, shapes: list) -> list:
    group = bind(world, Mesh(cp=world.size), [GroupSpec("context", ("cp",))])["context"]
    results = []
    for shape in shapes:
        own = rank_positions(layout, shape[3], group.size, group.rank)
        *leaves, grad = (x[:, :, own] for x in make_inputs(shape))
        leaves = [
            x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves
        ]  # as a model has them
        out = make_attention(version, kind, layout, group)(*leaves)
        out.backward(grad)
        results.append([out.detach(), *(x.grad for x in leaves)])
    return results


def assert_attention(seen: list, shapes: list, layout: str) -> None:
    """Check that each rank's results of `run_attention` are its positions of the reference."""
    for index, shape in enumerate(shapes):
        for whole, *parts in zip(reference_attention(shape), *(one[index] for one in seen), strict=True):
            for rank, part in enumerate(parts):
                own = rank_positions(layout, shape[3], len(seen), rank)
                # Sums of some hundred products of numbers near 1, in float64: 1e-12 is thousands of roundings.
                torch.testing.assert_close(part, whole[:, :, own], rtol=0, atol=1e-12)


@by_form
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@both_versions
def test_attention_and_its_gradients_are_those_of_one_process(ranks, version, size, kind, layout):
    shapes = [*SHAPES, (1, 12, 12, 2 * size, 1)]  # the shortest sequence that zigzag can shard
    assert_attention(ranks(run_attention, size, version, kind, layout, shapes), shapes, layout)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@both_versions
def test_attention_matches_one_process_over_gloo(ranks, version, kind):
    assert_attention(ranks(run_attention, 4, version, kind, "zigzag", SHAPES, backend="gloo"), SHAPES, "zigzag")


def error_of_uneven_heads(world: World, version: str) -> str:
    group = bind(world, Mesh(cp=world.size), [GroupSpec("context", ("cp",))])["context"]
    query, key, value, _ = make_inputs((1, 3, 3, 4, 2))
    try:
        make_attention(version, "ulysses", "contiguous", group)(query, key, value)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("version", "verb"), [("fast", "shared equally by"), ("simple", "sharded over")])
def test_heads_that_do_not_divide_are_refused(ranks, version, verb):
    expected = f"3 query heads cannot be {verb} 2 ranks: use ring attention"
    assert ranks(error_of_uneven_heads, 2, version) == [expected] * 2


LENGTH = 24
CONFIG = ModelConfig(48, 24, 36, 2, 12, 2, 32, dropout=0.3)


def full_model(config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config).double()
    init_parameters(model, 3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:  # ones would hide a norm whose weight is left out
                p.copy_(torch.linspace(0.5, 1.5, p.numel(), dtype=p.dtype))
            elif "k_proj" in name or "q_proj" in name:  # attention that is far from even
                p.mul_(8)
    return model


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(CONFIG.vocab_size, (3, LENGTH), generator=generator) for _ in range(2))
    labels[0, :3] = IGNORE_INDEX
    labels[1, 12:] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    return tokens, labels


SAMPLES = torch.tensor([4, 9, 2])


def loss_of(model: Transformer, own: torch.Tensor, rows: slice = slice(None)) -> tuple:
    """Loss sum and count of these samples at these positions."""
    tokens, labels = shard_sequence(*(x[rows] for x in make_batch()), own)
    return model(tokens, labels, address=DropoutAddress(7, 11, SAMPLES[rows], own), positions=own)


def collect_gradients(model: Transformer) -> dict:
    return {name: p.grad for name, p in named_parameters(model).items()}


def train_in_one_process() -> tuple:
    model = full_model()
    total, count = loss_of(model, torch.arange(LENGTH))
    total.backward()
    return total.item(), count.item(), collect_gradients(model)


def train_model(world: World, version: str, kind: str, layout: str | None, how: str = "plain") -> tuple:
    meter = Meter()
    group = bind(world, Mesh(cp=world.size), [GroupSpec("context", ("cp",))], meter=meter)["context"]
    model = full_model()
    APPLY[version](model, group, kind, layout)
    layout = layout or {"ring": "zigzag", "ulysses": "contiguous"}[kind]
    own = rank_positions(layout, LENGTH, group.size, group.rank)
    if how == "recomputed":
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    rows = [slice(0, 1), slice(1, 1), slice(1, 3)] if how == "micro-batches" else [slice(None)]
    results = [loss_of(model, own, at) for at in rows]  # all in flight before the first backward
    for total, _ in results:
        total.backward()
    total, count = (sum(x.item() for x in column) for column in zip(*results, strict=True))
    return total, count, collect_gradients(model), meter.records


def assert_sums(seen: list, expected: tuple) -> None:
    """Losses, counts and gradients of the ranks add up to those of one process."""
    total, count, gradients = expected
    assert sum(one[1] for one in seen) == count
    # Sums of some hundred terms in another order, in float64: 1e-13 is hundreds of roundings.
    assert sum(one[0] for one in seen) == pytest.approx(total, rel=1e-13)
    for name, grad in gradients.items():
        found = sum(one[2][name] for one in seen)
        torch.testing.assert_close(found, grad, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@by_form
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@both_versions
def test_loss_and_gradients_of_a_model_are_those_of_one_process(ranks, version, size, kind, layout):
    by_rank = ranks(train_model, size, version, kind, layout)
    assert_sums(by_rank, train_in_one_process())
    assert find_nccl_violations({rank: one[3] for rank, one in enumerate(by_rank)}) == []


@pytest.mark.parametrize("how", ["recomputed", "micro-batches"])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@both_versions
def test_recomputation_and_micro_batches_in_flight_change_nothing(ranks, version, kind, how):
    by_rank = ranks(train_model, 3, version, kind, None, how)
    assert_sums(by_rank, train_in_one_process())
    assert find_nccl_violations({rank: one[3] for rank, one in enumerate(by_rank)}) == []


def train_with_tensor_parallelism(world: World, kind: str, sequence: bool, version: str) -> tuple:
    uses = [GroupSpec("context", ("cp",)), GroupSpec("tp", ("tp",))]
    groups = bind(world, Mesh(cp=2, tp=2), uses, meter=Meter())
    model = full_model()
    held = apply_tensor_parallel(model, groups["tp"], sequence)
    APPLY[version](model, groups["context"], kind)
    layout = {"ring": "zigzag", "ulysses": "contiguous"}[kind]
    total, count = loss_of(model, rank_positions(layout, LENGTH, 2, groups["context"].rank))
    total.backward()
    return total.item(), count.item(), collect_gradients(model), held, groups.meter.records


@pytest.mark.parametrize(("version", "sequence"), [("fast", False), ("fast", True), ("simple", False)])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_context_parallelism_composes_with_tensor_parallelism(ranks, kind, version, sequence):
    by_rank = ranks(train_with_tensor_parallelism, 4, kind, sequence, version)
    assert find_nccl_violations({rank: one[4] for rank, one in enumerate(by_rank)}) == []
    total, count, gradients = train_in_one_process()
    for tp in range(2):
        held = by_rank[tp][3]
        parts = []
        for cp in range(2):  # tp ranks are neighbours
            loss, n, found, _, _ = by_rank[2 * cp + tp]
            holders = {name: h.holders if h.partial else (tp,) for name, h in held.items()}
            summed = {name: sum(by_rank[2 * cp + other][2][name] for other in holders[name]) for name in found}
            parts.append((loss, n, summed))
        assert_sums(parts, (total, count, {name: grad[held[name].box.slices] for name, grad in gradients.items()}))


def run_eager_and_compiled(world: World, kind: str, layout: str) -> list:
    meter = Meter()
    group = bind(world, Mesh(cp=world.size), [GroupSpec("context", ("cp",))], meter=meter)["context"]
    results = []
    for wrap in (lambda layer: layer, lambda layer: torch.compile(layer, fullgraph=True, backend="aot_eager")):
        model = full_model()
        apply_context_parallel(model, group, kind, layout)
        before, layer = len(meter.records), model.model.layers[0]
        x = torch.linspace(-1, 1, 2 * 4 * CONFIG.hidden_size, dtype=torch.float64).view(2, 4, -1).requires_grad_()
        y = wrap(layer)(x, model.model.rotary_tables(torch.arange(4) + 4 * world.rank, x.dtype))
        (y * y).sum().backward()
        results.append(
            (y.detach(), x.grad, layer.self_attn.k_proj.weight.grad, [r.name for r in meter.records[before:]])
        )
    return results


@pytest.mark.parametrize(("kind", "layout"), [FORMS[0], FORMS[3], *exhaustive(FORMS[1], FORMS[2])])
def test_a_block_compiles_in_one_graph_and_its_bytes_are_counted(ranks, kind, layout):
    # The ring of two: one hop forward; backward one of keys and values, one of their gradients.
    names = ["send", "recv"] * 3 if kind == "ring" else ["all_to_all"] * 4
    for eager, graph in ranks(run_eager_and_compiled, 2, kind, layout):
        for a, b in zip(eager[:3], graph[:3], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
        assert eager[3] == graph[3] == names
