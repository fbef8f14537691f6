"""The optimizer's parameter groups, and that slices of a parameter are updated like the full parameter."""

import dataclasses
import itertools

import pytest
import torch

from minidist.config import OptimConfig
from minidist.models.config import ModelConfig
from minidist.models.transformer import Transformer
from minidist.parameters import named_parameters, replicated_specs
from minidist.train.optimizer import make_optimizer, set_learning_rate
from minidist.train.torch_optimizers import SGD, AdamW

MODEL = ModelConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, tie_embeddings=False
)
KINDS = [
    OptimConfig(lr=0.01, weight_decay=0.1),
    OptimConfig(kind="sgd", lr=0.01, weight_decay=0.1),
    OptimConfig(kind="sgd", lr=0.01, weight_decay=0.1, momentum=0.9),
]
IDS = ["adamw", "sgd", "momentum"]
ALIGNED = 64  # elements of at least 4 bytes: a multiple of the vector length of all of torch's CPU kernels


def random_values(n, seed, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_model():
    made = Transformer(MODEL)
    return named_parameters(made), replicated_specs(made, (0,))


def names_by_group(optimizer, masters):
    by_id = {id(master): name for name, master in masters.items()}
    return [[by_id[id(each)] for each in group["params"]] for group in optimizer.param_groups]


def one_spec(shape, name="w"):
    holder = torch.nn.Module()
    holder.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    return replicated_specs(holder, (0,))[name]


@pytest.fixture
def one_thread():
    """On several threads a kernel splits a tensor by their number, which would change the roundings compared here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_full_and_sliced(optim, dtype, n, cuts, steps):
    """(values, state) after `steps` steps, of the full parameter and of its slices, concatenated."""
    whole, memory = random_values(n, 1, dtype).requires_grad_(), random_values(n, 1, dtype)
    places = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    parts = {f"w{i}": memory[place].requires_grad_() for i, place in enumerate(places)}
    one = make_optimizer(optim, {"w": whole}, {"w": one_spec((n,))})
    many = make_optimizer(optim, parts, {name: one_spec((n,)) for name in parts})
    for step in range(steps):
        whole.grad = random_values(n, 10 + step, dtype)
        for place, part in zip(places, parts.values(), strict=True):
            part.grad = whole.grad[place]
        for optimizer in (one, many):
            set_learning_rate(optimizer, 0.01 * (step + 1))
            optimizer.step()
    of_whole = {key: value for key, value in one.state[whole].items() if torch.is_tensor(value) and value.dim()}
    of_parts = {key: torch.cat([many.state[part][key] for part in parts.values()]) for key in of_whole}
    return (whole.detach(), of_whole), (memory, of_parts)


@pytest.mark.parametrize("optim", KINDS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "cuts"), [(1, [0]), (64, [0]), (1000, [0, 64, 64, 960]), (4099, [0, 64, 2048, 4096])])
def test_aligned_slices_are_updated_bit_for_bit_like_the_full_parameter(optim, dtype, n, cuts, one_thread):
    assert all(cut % ALIGNED == 0 for cut in cuts)
    (whole, of_whole), (parts, of_parts) = train_full_and_sliced(optim, dtype, n, [*cuts, n], 10)
    assert torch.equal(whole, parts) and all(torch.equal(of_whole[key], of_parts[key]) for key in of_whole)
    assert len(of_whole) == {"adamw": 2}.get(optim.kind, int(optim.momentum > 0))


@pytest.mark.parametrize("optim", KINDS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 7, 1000, 4099])
def test_any_slices_are_updated_like_the_full_parameter_up_to_rounding(optim, dtype, n, one_thread):
    """Also where a vector of the kernel ends inside a slice, and where a slice begins in the middle of one."""
    steps, eps = 10, torch.finfo(dtype).eps
    for cuts in ([0, n // 3, n], [0, 1, n // 2 + 1, n], [0, *range(0, n, max(1, n // 5)), n]):
        (whole, of_whole), (parts, of_parts) = train_full_and_sliced(optim, dtype, n, cuts, steps)
        # Rounded once or twice a step: the second moment differs by a bit a step, its root by half of that, an update
        # (at most lr * 10 for AdamW with these betas) and so the value by the sum of them.
        for key, value in of_whole.items():
            slack = steps * eps * value.abs() if key == "exp_avg_sq" else 0.0
            assert ((value - of_parts[key]).abs() <= slack).all(), key
        lr = 0.01 * steps
        slack = steps * (steps * eps * 10 * lr + eps * whole.abs()) if optim.kind == "adamw" else torch.zeros(())
        assert ((whole - parts).abs() <= slack).all()


@pytest.mark.parametrize("optim", [*KINDS, OptimConfig(kind="muon", weight_decay=0.1)], ids=[*IDS, "muon"])
def test_a_parameter_without_a_gradient_keeps_value_and_state(optim):
    masters, specs = make_model()
    optimizer = make_optimizer(optim, masters, specs)
    idle = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    for step in range(3):
        for number, (name, master) in enumerate(masters.items()):
            used = step != 1 or name not in idle
            master.grad = random_values(master.numel(), 100 * step + number).view_as(master) if used else None
        before = {name: master.detach().clone() for name, master in masters.items()}
        states = {
            name: {key: value.clone() for key, value in optimizer.state[masters[name]].items() if value is not None}
            for name in idle
        }
        optimizer.step()
        for name, master in masters.items():
            assert torch.equal(master.detach(), before[name]) == (step == 1 and name in idle), (step, name)
        if step == 1:
            for name in idle:
                after = {k: v for k, v in optimizer.state[masters[name]].items() if v is not None}
                assert after.keys() == states[name].keys()
                assert all(torch.equal(after[key], value) for key, value in states[name].items())


@pytest.mark.parametrize("optim", [*KINDS, OptimConfig(kind="muon")], ids=[*IDS, "muon"])
def test_the_first_gradient_may_come_after_the_first_step(optim):
    masters, specs = make_model()
    optimizer = make_optimizer(optim, masters, specs)
    late = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    for step in range(2):
        for name, master in masters.items():
            master.grad = None if step == 0 and name in late else torch.ones_like(master)
        before = {name: masters[name].detach().clone() for name in late}
        optimizer.step()
    assert not any(torch.equal(before[name], masters[name].detach()) for name in late)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_an_optimizer_without_parameters_can_step(kind):
    optimizer = make_optimizer(OptimConfig(kind=kind, decay="matrices"), {}, {})
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    assert optimizer.param_groups and not optimizer.state


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_weight_decay_applies_to_all_parameters_or_to_matrices(kind):
    masters, specs = make_model()
    every = make_optimizer(OptimConfig(kind=kind, weight_decay=0.3), masters, specs)
    assert names_by_group(every, masters) == [list(masters)] and every.param_groups[0]["weight_decay"] == 0.3
    some = make_optimizer(OptimConfig(kind=kind, weight_decay=0.3, decay="matrices"), masters, specs)
    assert names_by_group(some, masters) == [
        [name for name, master in masters.items() if master.dim() == 2],
        [name for name, master in masters.items() if master.dim() == 1],
    ]
    assert [group["weight_decay"] for group in some.param_groups] == [0.3, 0.0]


def test_matrices_are_recognized_by_their_global_shape():
    masters, specs = make_model()
    flat = {name: master.detach().flatten()[:3] for name, master in masters.items()}
    whole, cut = (make_optimizer(OptimConfig(decay="matrices"), each, specs) for each in (masters, flat))
    assert names_by_group(whole, masters) == names_by_group(cut, flat)


def test_muon_updates_the_layers_matrices_and_adamw_the_rest():
    masters, specs = make_model()
    optim = OptimConfig(
        kind="muon", weight_decay=0.3, decay="matrices", muon_lr_ratio=5.0, muon_momentum=0.8, muon_steps=3
    )
    optimizer = make_optimizer(optim, masters, specs)
    embedding, norms, hidden = names_by_group(optimizer, masters)
    assert embedding == ["model.embed_tokens.weight", "lm_head.weight"]
    assert all("norm" in name for name in norms) and len(norms) == 5
    assert all(name.endswith("_proj.weight") for name in hidden) and len(hidden) == 2 * 7
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0, 0.3]
    group = optimizer.param_groups[-1]
    assert (group["momentum"], group["steps"]) == (0.8, 3)
    assert group["shapes"] == [tuple(masters[name].shape) for name in hidden]


def test_learning_rates_of_groups_keep_their_ratio():
    masters, specs = make_model()
    optimizer = make_optimizer(OptimConfig(kind="muon", lr=2.0, muon_lr_ratio=5.0), masters, specs)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 10.0]
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.5]


def test_muon_refuses_a_shard_of_a_matrix():
    masters, specs = make_model()
    name = "model.layers.0.mlp.up_proj.weight"
    part = {name: masters[name].detach().flatten()[:40]}
    with pytest.raises(ValueError, match=rf"{name}: Muon needs the whole matrix \(24, 16\), and 40 elements .* here"):
        make_optimizer(OptimConfig(kind="muon"), part, specs)
    make_optimizer(OptimConfig(kind="adamw"), part, specs)


@pytest.mark.parametrize("optim", KINDS, ids=IDS)
def test_steps_match_torchs_optimizers(optim):
    masters, specs = make_model()
    theirs = [master.detach().clone().requires_grad_() for master in masters.values()]
    ours = make_optimizer(optim, masters, specs)
    if optim.kind == "adamw":
        reference = torch.optim.AdamW(theirs, 0.01, betas=optim.betas, eps=optim.eps, weight_decay=0.1, fused=True)
    else:
        reference = torch.optim.SGD(theirs, 0.01, optim.momentum, weight_decay=0.1, fused=optim.momentum == 0)
    for step in range(3):
        for number, (mine, other) in enumerate(zip(masters.values(), theirs, strict=True)):
            mine.grad = other.grad = random_values(mine.numel(), 50 * step + number).view_as(mine)
        ours.step()
        reference.step()
    assert all(map(torch.equal, masters.values(), theirs))


def test_fused_kernels_are_used_except_for_sgd_with_momentum():
    masters, specs = make_model()
    for optim, fused in zip(
        [*KINDS, dataclasses.replace(KINDS[0], kind="muon")], (True, True, False, True), strict=True
    ):
        groups = make_optimizer(optim, masters, specs).param_groups
        assert all(bool(group["fused"]) == fused for group in groups), optim


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (AdamW, torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}),
        (SGD, torch.optim.SGD, {"fused": True}),
        (SGD, torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_optimizers_without_the_compiler_are_those_of_torch(ours, theirs, options):
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2)]
    optimizers = [kind([one], lr=0.1, **options) for kind, one in zip((ours, theirs), parameters, strict=True)]
    for step in range(3):
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = torch.linspace(0, 1, 5) * step + parameter.detach()
            optimizer.step()
    assert torch.equal(*parameters) and not torch.equal(parameters[0], torch.linspace(-1, 1, 5))
    states = [optimizer.state_dict()["state"].get(0, {}) for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    assert all(value is None or torch.equal(value, states[1][name]) for name, value in states[0].items())
