"""Tensor parallelism against one process in float64: losses and every gradient, before any optimizer."""

from dataclasses import replace

import pytest
import torch

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.labels import IGNORE_INDEX
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer, cross_entropy_sum
from minidist.parallel.tensor.split import apply_tensor_parallel
from minidist.parallel.tensor.vocabulary import VocabParallelLoss
from minidist.parameters import named_parameters
from minidist.validation import validate_tensor_parallel

LENGTH = 12

SHAPES = {
    "grouped": ModelConfig(48, 48, 36, 2, 12, 6, 16),
    "fewer heads than ranks": ModelConfig(24, 24, 12, 1, 12, 1, 16, tie_embeddings=False),
    "two for four": ModelConfig(24, 32, 24, 2, 4, 2, 16, dropout=0.3),
}


def full_model(config: ModelConfig) -> Transformer:
    model = Transformer(config).double()
    init_parameters(model, 3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:  # ones would hide a norm whose weight is left out
                p.copy_(torch.linspace(0.5, 1.5, p.numel(), dtype=p.dtype))
    return model


def make_batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(config.vocab_size, (3, LENGTH), generator=generator) for _ in range(2))
    labels[0, :3] = IGNORE_INDEX
    return tokens, labels


def make_address(config: ModelConfig) -> DropoutAddress | None:
    return DropoutAddress(7, 11, torch.tensor([4, 9, 2]), torch.arange(LENGTH)) if config.dropout else None


def train_in_parallel(world: World, config: ModelConfig, sequence: bool) -> tuple:
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))], meter=Meter())["tp"]
    model = full_model(config)
    held = apply_tensor_parallel(model, group, sequence)
    total, count = model(*make_batch(config), address=make_address(config))
    total.backward()
    model.eval()
    logits = model(make_batch(config)[0]).detach()
    parameters = named_parameters(model)
    assert held.keys() == parameters.keys()
    found = {name: (held[name], p.detach(), p.grad) for name, p in parameters.items()}
    return total.item(), count.item(), logits, found


@pytest.mark.parametrize(("shape", "size"), [
    ("grouped", 1), ("grouped", 2), ("grouped", 3), ("fewer heads than ranks", 2), ("fewer heads than ranks", 3),
    ("fewer heads than ranks", 4), ("two for four", 4),
])  # fmt: skip
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_loss_and_gradients_are_those_of_one_process(ranks, shape, size, sequence):
    config = SHAPES[shape]
    model = full_model(config)
    tokens, labels = make_batch(config)
    total, count = cross_entropy_sum(model.lm_head(model.model(tokens, address=make_address(config))), labels)
    total.backward()
    model.eval()
    expected = named_parameters(model)
    by_rank = ranks(train_in_parallel, size, config, sequence)
    for loss, n, _, found in by_rank:
        assert n == count.item()
        # Sums of some hundred terms in another order, in float64: 1e-13 is hundreds of roundings.
        assert loss == pytest.approx(total.item(), rel=1e-13)
        assert found.keys() == expected.keys()
    logits = torch.cat([logits for _, _, logits, _ in by_rank], -1)
    torch.testing.assert_close(logits, model(tokens).detach(), rtol=0, atol=1e-12)
    for name, p in expected.items():
        covered = torch.zeros(p.shape, dtype=torch.int64)
        for rank, (_, _, _, found) in enumerate(by_rank):
            held, values, grad = found[name]
            assert rank in held.holders
            assert torch.equal(values, p.detach()[held.box.slices]), name
            if held.partial:
                grad = sum(by_rank[other][3][name][2] for other in held.holders)
            torch.testing.assert_close(
                grad, p.grad[held.box.slices], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
            if rank == held.holders[0]:
                covered[held.box.slices] += 1
        assert (covered == 1).all(), f"{name} is not covered once"


def record_traffic(world: World, config: ModelConfig, sequence: bool) -> list:
    meter = Meter()
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))], meter=meter)["tp"]
    model = full_model(config)
    apply_tensor_parallel(model, group, sequence)
    model(*make_batch(config))[0].backward()
    return [(record.name, tuple(record.shape)) for record in meter.records]


def test_collectives_of_one_step(ranks):
    config = replace(SHAPES["two for four"], dropout=0.0)
    b, s, h = 3, LENGTH, config.hidden_size
    forward = [(b, s, h)] + [(b, s, h)] * 2 * config.num_layers + [(b * s,), (2, b * s)]  # the last two: of the loss
    backward = [(b, s, h)] * (1 + 2 * config.num_layers)  # the head's input, and each branch's
    for records in ranks(record_traffic, 2, config, False):
        assert records == [("all_reduce", shape) for shape in forward + backward]
    # Sequence parallelism replaces each all-reduce of an activation by a reduce-scatter and an all-gather.
    inside = ["reduce_scatter"] + ["all_gather", "reduce_scatter"] * 2 * config.num_layers + ["all_gather"]
    back = [{"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}[name] for name in reversed(inside)]
    for records in ranks(record_traffic, 2, config, True):
        assert [name for name, _ in records] == [*inside, "all_reduce", "all_reduce", *back]


def error_of_uneven_sequence(world: World) -> str:
    config = SHAPES["grouped"]
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))])["tp"]
    model = full_model(config)
    apply_tensor_parallel(model, group, sequence_parallel=True)
    try:
        model(make_batch(config)[0][:, :7])
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_sequence_that_does_not_divide_is_refused(ranks):
    message = "dimension 1 has 7 elements, which cannot be sharded equally over 2 ranks"
    assert all(message in error for error in ranks(error_of_uneven_sequence, 2))


def loss_of_extreme_logits(world: World) -> list:
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))])["tp"]
    logits = torch.tensor([[[1e4, -1e4, 0.0, 3.0], [5.0, 5.0, 5.0, 5.0], [1.0, 2.0, 3.0, 4.0]]])
    first = 2 * group.rank
    part = logits[..., first : first + 2].clone().requires_grad_()
    kept = part.detach().clone()
    labels = torch.tensor([[2, 1, IGNORE_INDEX]])
    total, count = VocabParallelLoss(first, group)(part, labels)
    (3 * total).backward()
    assert torch.equal(part.detach(), kept), "the logits are left as they were"
    return [total, count, part.grad]


def test_vocab_parallel_loss_handles_huge_logits_and_ignored_labels(ranks):
    logits = torch.tensor([[[1e4, -1e4, 0.0, 3.0], [5.0, 5.0, 5.0, 5.0], [1.0, 2.0, 3.0, 4.0]]], requires_grad=True)
    total, count = cross_entropy_sum(logits, torch.tensor([[2, 1, IGNORE_INDEX]]))
    (3 * total).backward()
    for rank, (mine, n, grad) in enumerate(ranks(loss_of_extreme_logits, 2)):
        assert n == count == 2
        torch.testing.assert_close(mine, total.detach())
        torch.testing.assert_close(grad, logits.grad[..., 2 * rank : 2 * rank + 2])


@pytest.mark.parametrize(("change", "size", "message"), [
    ({"num_heads": 4, "num_kv_heads": 2}, 3, "num_heads=4 is not divisible by tp=3; possible tp: 1, 2"),
    ({"intermediate_size": 30}, 4, "intermediate_size=30 is not divisible by tp=4"),
    ({"vocab_size": 25}, 2, "vocab_size=25 is not divisible by tp=2; possible tp: 1; or vocab_size=26"),
    ({"num_heads": 12, "num_kv_heads": 3}, 2, "num_kv_heads=3 and tp=2: one must divide the other"),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(change, size, message):
    config = replace(SHAPES["grouped"], **change)
    with pytest.raises(ValueError) as caught:
        validate_tensor_parallel(config, size)
    assert message in str(caught.value)


def run_eager_and_compiled(world: World, sequence: bool) -> tuple:
    config = replace(SHAPES["two for four"], dropout=0.0)
    meter = Meter()
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))], meter=meter)["tp"]
    results = []
    for wrap in (lambda layer: layer, lambda layer: torch.compile(layer, fullgraph=True, backend="aot_eager")):
        model = full_model(config)
        apply_tensor_parallel(model, group, sequence)
        before, layer = len(meter.records), model.model.layers[0]
        x = torch.linspace(-1, 1, 2 * 4 * config.hidden_size, dtype=torch.float64).view(2, 4, -1).requires_grad_()
        length = 4 * world.size if sequence else 4
        y = wrap(layer)(x, model.model.rotary_tables(torch.arange(length), x.dtype))
        (y * y).sum().backward()
        names = [record.name for record in meter.records[before:]]
        results.append((y.detach(), x.grad, layer.self_attn.k_proj.weight.grad, names))
    return results


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_a_block_compiles_in_one_graph_and_its_bytes_are_counted(ranks, sequence):
    names = ["all_gather", "reduce_scatter"] * 4 if sequence else ["all_reduce"] * 4
    for eager, graph in ranks(run_eager_and_compiled, 2, sequence):
        for a, b in zip(eager[:3], graph[:3], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
        assert eager[3] == graph[3] == names
