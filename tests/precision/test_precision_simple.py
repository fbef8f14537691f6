"""The simple versions of chapter 06 equal torch's own, an fp32 or float64 reference, and the fast versions."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from minidist import recompute
from minidist.comm import Meter, bind
from minidist.config import PrecisionConfig
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.precision import masters, scaler, simple
from minidist.precision.dtypes import PrecisionDtypes
from minidist.process_groups import GroupSpec
from minidist.train.agree import agree_on_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def random_overflows(steps: int, seed: int) -> list[bool]:
    """Overflows that come in runs, with pauses of up to ten steps."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (steps,), generator=generator).tolist()
    return [number % 3 == 2 for number, length in enumerate(lengths) for _ in range(length)][:steps]


# --- LossScaler


@pytest.mark.parametrize("interval", [1, 3, 7])
def test_scales_equal_those_of_torchs_grad_scaler(interval):
    config = PrecisionConfig(initial_scale=2.0**120, growth_interval=interval)  # near the end of fp32's range
    ours, weight = simple.LossScaler(config), torch.zeros(1, requires_grad=True)
    torchs = torch.amp.GradScaler("cpu", init_scale=config.initial_scale, growth_interval=interval)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    torchs.scale(torch.ones(1))  # makes its state
    for overflow in [False] * (9 * interval) + random_overflows(120, interval):
        weight.grad = torch.full((1,), math.inf if overflow else 0.0)
        torchs.step(optimizer)
        torchs.update()
        ours.update(overflow)
        assert ours.scale == torchs.get_scale()


def test_simple_and_fast_scaler_agree_and_continue_each_others_state():
    config = PrecisionConfig(growth_interval=3, max_overflows=4)
    pair = [simple.LossScaler(config), scaler.LossScaler(config)]
    for step, overflow in enumerate(random_overflows(200, 0)):
        for each in pair:
            each.update(overflow)
        one, other = pair
        assert one.state_dict() == other.state_dict() and scaler.LossScaler.is_valid_state(one.state_dict())
        assert (one.scale, one.overflowed, one.exhausted) == (other.scale, other.overflowed, other.exhausted)
        if step % 5 == 0:  # each continues from what the other saved
            pair = [simple.LossScaler(config), scaler.LossScaler(config)]
            for each, state in zip(pair, (other.state_dict(), one.state_dict()), strict=True):
                each.load_state_dict(json.loads(json.dumps(state)))


def test_loaded_state_shares_no_list_with_its_source():
    one, other = (simple.LossScaler(PrecisionConfig()) for _ in range(2))
    one.update(True)
    state = one.state_dict()
    other.load_state_dict(state)
    other.update(True)
    assert (len(one.overflowed), len(state["overflowed"]), len(other.overflowed)) == (1, 1, 2)


# --- MasterWeights and round_stochastically


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_masters_follow_fp32_training_and_parameters_are_their_rounding(dtype):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((4, 3), (5,), ())]
    params = [value.to(dtype) for value in values]
    ours, reference = simple.MasterWeights(params, values), [value.clone() for value in values]
    mine, torchs = (torch.optim.AdamW(tensors, lr=1e-4) for tensors in (ours.masters, reference))
    for _ in range(50):
        gradients = [torch.randn(value.shape, generator=generator).to(dtype) for value in values]
        ours.attach_grads([gradient * 8 for gradient in gradients], scale=8.0)  # powers of two: no rounding
        for tensor, gradient in zip(reference, gradients, strict=True):
            tensor.grad = gradient.float()
        mine.step()
        torchs.step()
        ours.copy_to_params()
        for param, master, expected in zip(params, ours.masters, reference, strict=True):
            assert torch.equal(master, expected) and torch.equal(param, expected.to(dtype))


def test_scale_is_divided_out_in_fp32():
    params = [torch.zeros(2, dtype=FP16)]
    ours = simple.MasterWeights(params, [torch.zeros(2)])
    ours.attach_grads([torch.tensor([2.0**-24, 1.0], dtype=FP16)], scale=2.0**16)  # fp16 has no 2**-40
    assert ours.masters[0].grad.tolist() == [2.0**-40, 2.0**-16]


def test_simple_and_fast_masters_agree():
    values = {"a": torch.linspace(0.5, 1.5, 7), "b": torch.linspace(-2, 2, 4)}
    flat, bounds = torch.cat(list(values.values())).to(BF16), {"a": (0, 7), "b": (7, 11)}
    fast = masters.MasterWeights(flat, bounds, values, PrecisionDtypes(BF16, FP32, FP32, FP32, FP32))
    params = [value.to(BF16) for value in values.values()]
    ours = simple.MasterWeights(params, values.values())
    optimizers = [torch.optim.AdamW(tensors, lr=1e-3) for tensors in (fast.views.values(), ours.masters)]
    for step in range(10):
        gradient = torch.arange(11.0) + step
        fast.attach_grads(gradient)
        ours.attach_grads(gradient.split([7, 4]))
        for optimizer in optimizers:
            optimizer.step()
        fast.copy_to_params()
        ours.copy_to_params()
        assert torch.equal(flat, torch.cat(params))
        assert torch.equal(fast.tensor, torch.cat(ours.masters))


def test_stochastic_rounding_keeps_exact_values_and_chooses_neighbours_with_the_right_probability():
    generator = torch.Generator().manual_seed(0)
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 3.3895e38, math.inf, -math.inf]).to(BF16)
    assert torch.equal(simple.round_stochastically(exact.float(), generator).view(torch.int16), exact.view(torch.int16))
    assert simple.round_stochastically(torch.tensor([math.nan]), generator).isnan().all()
    draws = 20_000
    for value, low, high in ((1.001, 1.0, 1 + 2**-7), (-0.3, -0.30078125, -0.298828125), (3e-40, 0.0, None)):
        rounded = simple.round_stochastically(torch.full((draws,), value), generator).double()
        assert len(rounded.unique()) == 2
        if high is not None:
            assert rounded.unique().tolist() == [low, high]
        step = (rounded.max() - rounded.min()).item()
        # The mean of n draws of two values at distance `step` has a standard deviation of at most step / 2 / sqrt(n).
        assert abs(rounded.mean().item() - value) < 5 * step / 2 / math.sqrt(draws)


def test_masters_round_stochastically_with_a_generator():
    params, values = [torch.ones(10_000, dtype=BF16)], [torch.full((10_000,), 1 + 2.0**-9)]  # a quarter of the spacing
    ours = simple.MasterWeights(params, values, torch.Generator().manual_seed(1))
    ours.copy_to_params()
    up = (params[0] != 1).float().mean().item()
    assert abs(up - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 10_000)  # five standard deviations
    assert torch.equal(ours.masters[0], values[0])


# --- step_or_skip


def train_shards(world, spoiled, dtype) -> list:
    """Five steps on shards of one parameter; in some, one element of the gradient on one rank is not finite.

    spoiled: {step: (rank, value)}. Per step: whether it was done, the scale, this rank's state before and after, and
    the operations of the group.
    """
    mesh = Mesh(dp=world.size)
    groups = bind(world, mesh, (GroupSpec("data", ("dp",)),), meter=Meter())
    group, numel = groups["data"], world.rank + 1  # shards of different sizes
    values = [torch.linspace(1, 2, numel), torch.linspace(-1, 0, 3)]
    params = [value.to(dtype) for value in values]
    weights = simple.MasterWeights(params, values)
    optimizer = torch.optim.SGD(weights.masters, lr=0.01, momentum=0.5)
    loss_scaler, seen = simple.LossScaler(PrecisionConfig(initial_scale=64.0, growth_interval=1)), []

    def snapshot():
        states = [t for state in optimizer.state.values() for t in state.values() if t is not None]
        return [t.clone() for t in (*params, *weights.masters, *states)]

    for step in range(5):
        gradients = [torch.full_like(v, (step + 1) * loss_scaler.scale) for v in values]
        rank, value = spoiled.get(step, (None, None))
        if rank == world.rank:
            gradients[1][2] = value
        before = snapshot()
        done = simple.step_or_skip(weights, gradients, optimizer, loss_scaler, group)
        after = snapshot()
        equal = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        seen.append((done, equal, loss_scaler.scale))
    final = [t.tolist() for t in weights.masters]
    groups.destroy()
    return [seen, final, [param.dtype for param in params] == [dtype, dtype]]


def expected_shard(steps, numel):
    """The masters after these steps, by SGD alone."""
    values = [torch.linspace(1, 2, numel), torch.linspace(-1, 0, 3)]
    optimizer = torch.optim.SGD(values, lr=0.01, momentum=0.5)
    for step in steps:
        for value in values:
            value.grad = torch.full_like(value, float(step + 1))
        optimizer.step()
    return [value.tolist() for value in values]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_step_or_none(ranks, size):
    spoiled = {1: (0, math.inf), 3: (size - 1, math.nan)}
    for rank, (seen, final, keeps_dtype) in enumerate(ranks(train_shards, size, spoiled, BF16)):
        assert [done for done, _, _ in seen] == [True, False, True, False, True]
        assert [equal for _, equal, _ in seen] == [False, True, False, True, False]
        assert [scale for _, _, scale in seen] == [128, 64, 128, 64, 128]
        assert final == expected_shard((0, 2, 4), rank + 1) and keeps_dtype


def agree_both(world) -> list:
    """The decision and the scale of the simple and the fast version, when one rank's gradient overflows, or none."""
    groups = bind(world, Mesh(dp=world.size), (GroupSpec("data", ("dp",)),), meter=Meter())
    group, found = groups["data"], []
    for bad in (None, *range(world.size)):
        config = PrecisionConfig(growth_interval=1)
        gradient = torch.tensor([1.0, math.inf if world.rank == bad else 2.0])
        weight = simple.MasterWeights([torch.zeros(2, dtype=BF16)], [torch.zeros(2)])
        one, other = simple.LossScaler(config), scaler.LossScaler(config)
        done = simple.step_or_skip(weight, [gradient], torch.optim.SGD(weight.masters, 0.1), one, group)
        result, _ = agree_on_step(0.0, gradient.square().sum().item(), False, (), 1, other, group)
        found.append((done, result.update_successful, one.state_dict() == other.state_dict()))
    groups.destroy()
    return found


def test_simple_and_fast_agreement_agree(ranks):
    assert ranks(agree_both, 3) == [[(True, True, True)] + [(False, False, True)] * 3] * 3


# --- with_recomputation


class Block(nn.Module):
    """A residual block with torch's own dropout."""

    def __init__(self, seed: int, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(8, 32, generator=generator).to(dtype))
        self.down = nn.Parameter(torch.randn(32, 8, generator=generator).to(dtype))
        self.runs = 0

    def forward(self, x, scale):
        self.runs += 1
        return x + F.dropout(torch.tanh(x @ self.up).sin() @ self.down, 0.25) * scale


def keep(run):
    return run


def torchs(run):
    return lambda *args: checkpoint(run, *args, use_reentrant=False)


def gradients_with(wrap, dtype, requires_grad=True):
    """Output, gradients and following random number of three blocks, two micro-batches, backward in reverse order."""
    torch.manual_seed(3)
    blocks = [Block(number, dtype) for number in range(3)]
    wrapped = [wrap(block.forward) for block in blocks]
    inputs = [torch.full((5, 8), 0.5 + i, dtype=dtype, requires_grad=requires_grad) for i in range(2)]
    outputs = []
    for x in inputs:
        for block in wrapped:
            x = block(x, 0.5)
        outputs.append(x)
    for out in reversed(outputs):
        out.square().sum().backward()
    found = [*outputs, *(x.grad for x in inputs if requires_grad), *(p.grad for b in blocks for p in b.parameters())]
    return found, torch.rand(3), [block.runs for block in blocks]


@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_recomputed_gradients_equal_torchs_bit_for_bit(dtype, requires_grad):
    plain, torch_checkpoint, ours = (
        gradients_with(wrap, dtype, requires_grad) for wrap in (keep, torchs, simple.with_recomputation)
    )
    for found in (torch_checkpoint, ours):
        assert all(torch.equal(a, b) for a, b in zip(found[0], plain[0], strict=True))
        assert torch.equal(found[1], plain[1])  # the random state is as it would be without recomputation
    assert ours[2] == [4, 4, 4] and plain[2] == [2, 2, 2]


def test_backward_twice_and_no_grad():
    block, x = Block(0, FP32), torch.ones(2, 8, requires_grad=True)
    out = simple.with_recomputation(block.forward)(x, 1.0).sum()
    out.backward(retain_graph=True)
    once = block.up.grad.clone()
    out.backward()
    assert torch.equal(block.up.grad, 2 * once) and block.runs == 3
    with torch.no_grad():
        assert not simple.with_recomputation(block.forward)(x, 1.0).requires_grad
    assert block.runs == 4


def saved_bytes(model: Transformer) -> int:
    """Bytes that autograd keeps for backward, without the parameters."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model)
    loss.backward()
    return sum(size for pointer, size in kept.items() if pointer not in own)


def loss_of(model):
    tokens = torch.randint(56, (3, 24), generator=torch.Generator().manual_seed(0))
    address = DropoutAddress(1, 0, torch.arange(3), torch.arange(24))
    return model(tokens, tokens.roll(-1, 1), address=address)[0]


def test_simple_and_fast_recomputation_agree_in_a_transformer_and_save_fewer_bytes():
    config, found = ModelConfig(56, 32, 44, 3, num_heads=4, num_kv_heads=2, dropout=0.1), []
    for wrap in (keep, recompute.with_recomputation, simple.with_recomputation):
        model = Transformer(config)
        init_parameters(model, seed=1)
        for layer in model.model.layers:
            layer.forward = wrap(layer.forward)
        found.append((saved_bytes(model), [p.grad for p in model.parameters()]))
    (plain, gradients), (fast_bytes, fast), (simple_bytes, ours) = found
    for a, b, c in zip(gradients, fast, ours, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert simple_bytes == fast_bytes < plain / 2


def test_tensors_inside_are_freed_before_backward_and_during_it():
    made, gone = [], []

    def run(x):
        first = x.exp()
        second = first.exp()
        made.append([StorageWeakRef(t.untyped_storage()) for t in (first, second)])
        if len(made) == 1:
            first.register_hook(lambda _: gone.extend(ref.expired() for ref in made[-1]))
        return second * 2

    out = simple.with_recomputation(run)(torch.ones(4, requires_grad=True))
    assert all(ref.expired() for ref in made[0])
    out.sum().backward()
    assert gone == [False, True]  # the second is gone once its backward is done, the first is still needed
