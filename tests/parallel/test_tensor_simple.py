"""The simple version of tensor parallelism against torch's own, DTensor, in float64; `test_tensor_parallel` compares it
with one process."""

import pytest
import torch

from minidist.comm import GroupSpec, World, all_reduce, bind
from minidist.labels import IGNORE_INDEX
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallel.tensor import simple
from minidist.parameters import named_parameters

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
    group = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))])["tp"]
    model = full_model()
    held = simple.apply_tensor_parallel(model, group, sequence)
    total, _ = model(*make_batch())
    total.backward()
    grads = {name: p.grad for name, p in named_parameters(model).items()}
    for name, grad in grads.items():
        if held[name].partial:
            all_reduce(grad, group)  # no rank shares a key head with another, so these are the norms of all ranks
    return total.item(), grads


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
    for (loss, grads), (expected, expected_grads) in zip(own, torchs, strict=True):
        # Sums of some hundred terms in another order, in float64.
        assert loss == pytest.approx(expected, rel=1e-13)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad, expected_grads[name], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
