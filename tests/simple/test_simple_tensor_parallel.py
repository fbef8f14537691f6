"""Tensor parallelism of the simple trainer, against torch's own (DTensor) and one process, in float64."""

import dataclasses

import pytest
import torch

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.labels import IGNORE_INDEX
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer, cross_entropy_sum
from minidist.parameters import named_parameters
from minidist.simple.tensor_parallel import apply_tensor_parallel, gather_features, vocab_parallel_loss
from minidist.tools.recording_backend import register_recording_backend

CONFIG = ModelConfig(24, 24, 36, 2, 12, 12, 16, tie_embeddings=False)
LENGTH = 12


def full_model() -> Transformer:
    model = Transformer(CONFIG).double()
    init_parameters(model, 3)
    return model


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(CONFIG.vocab_size, (3, LENGTH), generator=generator) for _ in range(2))
    labels[0, :3] = IGNORE_INDEX
    return tokens, labels


def run_simple(world: World, sequence: bool) -> tuple:
    meter = Meter()
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))], meter=meter)["tp"]
    model = full_model()
    apply_tensor_parallel(model, group, sequence_parallel=sequence)
    total, _ = model(*make_batch())
    total.backward()
    grads = {name: p.grad for name, p in named_parameters(model).items()}
    return total.item(), grads, [(record.name, tuple(record.shape)) for record in meter.records]


def torch_plan(sequence: bool) -> dict:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    outside = Shard(1) if sequence else Replicate()
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)}
    for layer in (f"model.layers.{index}" for index in range(CONFIG.num_layers)):
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan |= {f"{layer}.{name}": ColwiseParallel() for name in columns}
        rows = ("self_attn.o_proj", "mlp.down_proj")
        plan |= {f"{layer}.{name}": RowwiseParallel(output_layouts=outside) for name in rows}
        if sequence:
            inputs = {"input_layouts": (outside, None), "desired_input_layouts": (Replicate(), None)}
            plan[f"{layer}.self_attn"] = PrepareModuleInput(**inputs)
            plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
    norms = [name.removesuffix(".weight") for name in named_parameters(full_model()) if "norm" in name]
    plan |= {name: SequenceParallel(use_local_output=True) for name in norms} if sequence else {}
    head = ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False)
    return plan | {"lm_head": head}


def run_torch(world: World, sequence: bool) -> tuple:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    model = parallelize_module(full_model(), init_device_mesh("cpu", (world.size,)), torch_plan(sequence))
    tokens, labels = make_batch()
    with loss_parallel():
        logits = model(tokens)
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        total.backward()
    grads = {}
    for name, parameter in named_parameters(model).items():
        grad = parameter.grad
        is_distributed = isinstance(grad, DTensor)  # norms are not, without sequence parallelism
        grads[name] = grad.redistribute(placements=parameter.placements).to_local() if is_distributed else grad
    return (total.full_tensor() if isinstance(total, DTensor) else total).item(), grads


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_loss_and_gradients_are_those_of_torch(ranks, size, sequence):
    own, torchs = ranks(run_simple, size, sequence), ranks(run_torch, size, sequence, backend="gloo")
    for (loss, grads, _), (expected, expected_grads) in zip(own, torchs, strict=True):
        # Sums of some hundred terms in another order, in float64.
        assert loss == pytest.approx(expected, rel=1e-13)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad, expected_grads[name], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


def gradients_beside_frozen_parameters(world: World, size: int) -> dict[str, torch.Tensor | None]:
    """The gradients of a model of which a norm, a matrix and the key heads' weights are frozen; `size` 1: unsharded."""
    model = Transformer(dataclasses.replace(CONFIG, num_kv_heads=1)).double()
    init_parameters(model, 3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROZEN)
    if size > 1:
        group = bind(world, Mesh(tp=size), [GroupSpec("tp", ("tp",))])["tp"]
        apply_tensor_parallel(model, group, group, sequence_parallel=True)
    model(*make_batch())[0].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


FROZEN = (
    "model.layers.0.input_layernorm.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.mlp.gate_proj.weight",
)


def test_frozen_parameters_stay_frozen_and_need_no_sum(ranks):
    [expected] = ranks(gradients_beside_frozen_parameters, 1, 1)
    for gradients in ranks(gradients_beside_frozen_parameters, 2, 2):
        assert {name for name, gradient in gradients.items() if gradient is None} == set(FROZEN)
        for name, gradient in gradients.items():
            if gradient is not None and gradient.shape == expected[name].shape:  # not sharded
                torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)


def test_collectives_of_one_step(ranks):
    b, s, h, layers = 3, LENGTH, CONFIG.hidden_size, CONFIG.num_layers
    forward = [(b, s, h)] + [(b, s, h)] * 2 * layers + [(b, s), (2, b, s)]  # the last two: of the loss
    backward = [(b, s, h)] * (1 + 2 * layers)  # the head's input, and each branch's
    for _, _, records in ranks(run_simple, 2, False):
        assert records == [("all_reduce", shape) for shape in forward + backward]
    # Sequence parallelism replaces each all-reduce of an activation by a reduce-scatter and an all-gather.
    inside = ["reduce_scatter"] + ["all_gather", "reduce_scatter"] * 2 * layers + ["all_gather"]
    back = [{"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}[name] for name in reversed(inside)]
    for _, _, records in ranks(run_simple, 2, True):
        of_norms = [record for record in records if record == ("all_reduce", (h,))]
        assert len(of_norms) == 1 + 2 * layers
        names = [record[0] for record in records if record not in of_norms]
        assert names == [*inside, "all_reduce", "all_reduce", *back]


def error_of_uneven_sequence(world: World) -> str:
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))])["tp"]
    model = full_model()
    apply_tensor_parallel(model, group, sequence_parallel=True)
    try:
        model(make_batch()[0][:, :7])
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_sequence_that_does_not_divide_is_refused(ranks):
    message = "reduce_scatter over 2 ranks: the full tensor has 504 elements of torch.float64, the shard 216 "
    assert all(message in error for error in ranks(error_of_uneven_sequence, 2))


def loss_of_extreme_logits(world: World) -> list:
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))])["tp"]
    logits, labels = extreme_logits()
    part = logits.chunk(2, -1)[group.rank].clone().requires_grad_()
    kept = part.detach().clone()
    total, count = vocab_parallel_loss(part, labels, group)
    (3 * total).backward()
    assert torch.equal(part.detach(), kept), "the logits are left as they were"
    return [total, count, part.grad]


def extreme_logits() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.tensor([[[1e4, -1e4, 0.0, 3.0], [5.0, 5.0, 5.0, 5.0], [1.0, 2.0, 3.0, 4.0]]])
    return logits, torch.tensor([[2, 1, IGNORE_INDEX]])


def test_vocab_parallel_loss_handles_huge_logits_and_ignored_labels(ranks):
    logits, labels = extreme_logits()
    total, count = cross_entropy_sum(logits.requires_grad_(), labels)
    (3 * total).backward()
    for rank, (mine, n, grad) in enumerate(ranks(loss_of_extreme_logits, 2)):
        assert n == count == 2
        torch.testing.assert_close(mine, total.detach())
        torch.testing.assert_close(grad, logits.grad.chunk(2, -1)[rank])


def gather_on_ranks(world, recorded):
    """Gather each rank's columns of a matrix; every rank then computes the same weighted sum of squares."""
    backend = register_recording_backend(Meter()) if recorded else None
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tensor", ("tp",))], backend=backend)["tensor"]
    full = torch.arange(24.0, dtype=torch.float64).view(2, 12) / 7
    own = full.chunk(world.size, 1)[world.rank].clone().requires_grad_()
    gathered = gather_features(own, group)
    weights = torch.arange(24.0, dtype=torch.float64).view(2, 12)
    (gathered.square() * weights).sum().backward()
    expected = (2 * full * weights).chunk(world.size, 1)[world.rank]
    return torch.equal(gathered, full), torch.equal(own.grad, expected)


# The recording backend, which notebooks and checks use, is stricter about shapes than the others.
@pytest.mark.parametrize(("size", "recorded"), [(1, False), (2, False), (3, False), (4, False), (2, True)])
def test_gathered_features_pass_each_rank_its_slice_of_the_gradient(ranks, size, recorded):
    assert ranks(gather_on_ranks, size, recorded) == [(True, True)] * size
