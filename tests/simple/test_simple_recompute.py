"""A recomputed block saves its input only, and its weights get their gradients also if its input needs none."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.simple.recompute import recompute_block


def make_block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4))


def test_a_block_saves_its_input_only():
    block, hidden, saved = make_block(), torch.ones(3, 4, requires_grad=True), []
    recompute_block(block)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        block(hidden)
    assert len(saved) == 1 and saved[0].data_ptr() == hidden.data_ptr()


def test_a_block_behind_a_frozen_embedding_gets_its_gradients():
    plain = make_block()
    block, hidden = copy.deepcopy(plain), torch.ones(3, 4)
    recompute_block(block)
    for each in (plain, block):
        out = each(hidden)
        assert out.requires_grad
        out.square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), block.parameters(), strict=True))


class Block(nn.Module):
    """A residual block, which counts how often it runs."""

    def __init__(self, seed: int, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(8, 32, generator=generator).to(dtype))
        self.down = nn.Parameter(torch.randn(32, 8, generator=generator).to(dtype))
        self.runs = 0

    def forward(self, x, scale):
        self.runs += 1
        return x + torch.tanh(x @ self.up).sin() @ self.down * scale


def keep(block):
    pass


def recompute_as_torch_does(block):
    run = block.forward
    block.forward = lambda *args: checkpoint(run, *args, use_reentrant=False)


def gradients_with(wrap, dtype, requires_grad=True):
    """Output and gradients of three blocks, two micro-batches, backward in reverse order; how often each block ran."""
    blocks = [Block(number, dtype) for number in range(3)]
    for block in blocks:
        wrap(block)
    inputs = [torch.full((5, 8), 0.5 + i, dtype=dtype, requires_grad=requires_grad) for i in range(2)]
    outputs = []
    for x in inputs:
        for block in blocks:
            x = block(x, 0.5)
        outputs.append(x)
    for out in reversed(outputs):
        out.square().sum().backward()
    found = [*outputs, *(x.grad for x in inputs if requires_grad), *(p.grad for b in blocks for p in b.parameters())]
    return found, [block.runs for block in blocks]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_recomputed_gradients_equal_torchs_bit_for_bit(dtype, requires_grad):
    (plain, runs), (torchs, _), (ours, runs_recomputed) = (
        gradients_with(wrap, dtype, requires_grad) for wrap in (keep, recompute_as_torch_does, recompute_block)
    )
    for found in (torchs, ours):
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert runs == [2, 2, 2] and runs_recomputed == [4, 4, 4]


def test_backward_can_run_twice_and_nothing_is_recomputed_without_gradients():
    block, x = Block(0, torch.float32), torch.ones(2, 8, requires_grad=True)
    recompute_block(block)
    out = block(x, 1.0).sum()
    out.backward(retain_graph=True)
    once = block.up.grad.clone()
    out.backward()
    assert torch.equal(block.up.grad, 2 * once) and block.runs == 3
    with torch.no_grad():
        assert not block(x, 1.0).requires_grad
    assert block.runs == 4


def saved_bytes(model: Transformer) -> int:
    """Bytes that autograd keeps for backward, without the parameters."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randint(56, (3, 24), generator=torch.Generator().manual_seed(0))
    address = DropoutAddress(1, 0, torch.arange(3), torch.arange(24))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, tokens.roll(-1, 1), address=address)[0]
    loss.backward()
    return sum(size for pointer, size in kept.items() if pointer not in own)


def test_a_recomputed_transformer_has_equal_gradients_and_saves_fewer_bytes():
    config, found = ModelConfig(56, 32, 44, 3, num_heads=4, num_kv_heads=2, dropout=0.1), []
    for wrap in (keep, recompute_block):
        model = Transformer(config)
        init_parameters(model, seed=1)
        for layer in model.model.layers:
            wrap(layer)
        found.append((saved_bytes(model), [p.grad for p in model.parameters()]))
    (plain, gradients), (recomputed, ours) = found
    assert all(torch.equal(a, b) for a, b in zip(gradients, ours, strict=True))
    assert recomputed < plain / 2


def test_tensors_inside_a_block_are_freed_before_backward_and_during_it():
    made, gone = [], []

    class Powers(nn.Module):
        def forward(self, x):
            first = x.exp()
            second = first.exp()
            made.append([StorageWeakRef(t.untyped_storage()) for t in (first, second)])
            if first.requires_grad:
                first.register_hook(lambda _: gone.extend(ref.expired() for ref in made[-1]))
            return second * 2

    block = Powers()
    recompute_block(block)
    out = block(torch.ones(4, requires_grad=True))
    assert all(ref.expired() for ref in made[0])
    out.sum().backward()
    assert gone == [False, True]  # the second is gone once its backward is done, the first is still needed
