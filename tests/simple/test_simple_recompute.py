"""A recomputed block saves its input only, and its weights get their gradients also if its input needs none."""

import copy

import torch
from torch import nn

from minidist.simple.recompute import recompute_block


def make_block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4))


def test_a_block_saves_its_input_only():
    block, hidden, saved = make_block(), torch.ones(3, 4, requires_grad=True), []
    recompute_block(block)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
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
