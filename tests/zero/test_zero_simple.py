"""The simple ZeRO against one process in float64, torch's FSDP2 and ZeRO, the fast version, and the bytes by hand."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from minidist.comm import GroupSpec, Meter, bind
from minidist.mesh import Mesh
from minidist.parallel.data.reducer import register_gradient_hooks
from minidist.parallel.data.replicate import broadcast_model
from minidist.parameters import named_parameters
from minidist.train.engine import Engine
from minidist.zero.plan import block_index
from minidist.zero.simple import FlatParameter, ZeroStage1, ZeroStage2, ZeroStage3
from tests.helpers.exhaustive import exhaustive
from tests.helpers.zero_engines import build_engine, local_micro_batches, make_config

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
SAMPLES, STEPS, LR = 9, 3, 0.02
ADAMW = {"lr": LR, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
# float64: the ranks' gradients are summed in another order than one process sums over samples, which moves sums of some
# hundred terms by about 1e-14 of their size; AdamW with an eps of 1e-3 multiplies that by at most lr / eps = 20.
EXACT = {"rtol": 1e-11, "atol": 1e-12}


class Block(nn.Module):
    """A residual block of two linear layers: 5 -> 7 -> 5 features, 82 parameters."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Net(nn.Module):
    """Three blocks with parameters before, after and beside them; the numbers of elements are 82, 82, 82 and 51.

    rare: used by a batch only if its first number is positive. never: not used.
    """

    def __init__(self, seed):
        super().__init__()
        self.first, self.layers = nn.Linear(3, 5), nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 2)
        self.rare, self.never = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(7))
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, data):
        hidden = self.first(data)
        for layer in self.layers:
            hidden = layer(hidden)
        out = self.head(self.norm(hidden))
        return out + self.rare * data.sum() if len(data) and data[0, 0] > 0 else out


def blocks_of(model):
    return {
        layer: [name for name in named_parameters(model) if name.startswith(f"layers.{index}.")]
        for index, layer in enumerate(model.layers)
    }


def batch_of(step):
    """(SAMPLES, 3): the samples of a step. Only the last sample's first number is positive: one rank uses `rare`."""
    generator = torch.Generator().manual_seed(100 + step)
    data = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    data[:, 0] = -data[:, 0].abs()
    data[-1, 0] *= -1
    return data


def loss_of(model, data):
    """The sum over the samples, over the number of samples of all ranks; `rare` for a batch of its own."""
    return (model(data) ** 2).sum() / SAMPLES


def micro_batches_of(step, rank, size):
    """A rank's samples of a step, in three micro-batches: with three ranks or more, rank 0 has no samples at all."""
    data, sharers = batch_of(step), max(1, size - (size > 2))
    first = data[:0] if size > 2 and rank == 0 else data[:-1][rank % sharers :: sharers]
    return [*first.tensor_split(2), data[-1:] if rank == size - 1 else data[:0]]


def train_alone(model, steps):
    """One process: the gradients and their norm in each step, and the parameters after the last."""
    optimizer, gradients, norms = torch.optim.AdamW(model.parameters(), **ADAMW), [], []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for data in micro_batches_of(step, 0, 1):
            loss_of(model, data).backward()
        gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        norms.append(torch.nn.utils.get_total_norm([g for g in gradients[-1].values() if g is not None]).item())
        optimizer.step()
    return gradients, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


class Sharded:
    """A model under the simple ZeRO, with rank 0's values on all ranks although each rank was made with others."""

    def __init__(self, world, stage):
        self.world, self.meter = world, Meter()
        self.group = bind(world, Mesh(dp=world.size), [GroupSpec("grads", ("dp",))], meter=self.meter)["grads"]
        self.model = Net(world.rank)
        broadcast_model(self.model, self.group)
        self.zero = STAGES[stage](self.model, blocks_of(self.model), self.group)
        self.is_last = False
        is_ready = lambda: self.zero.reduces_each_micro_batch or self.is_last  # noqa: E731
        register_gradient_hooks(named_parameters(self.model), self.zero, is_ready)
        self.optimizer = torch.optim.AdamW(list(self.zero.masters.values()), **ADAMW)

    def run_backward(self, batches):
        for number, data in enumerate(batches):
            self.is_last = number == len(batches) - 1
            if len(data) or self.zero.gatherer:  # as the trainer: only stage 3 needs all ranks in forward
                loss_of(self.model, data).backward()
            self.zero.finish_micro_batch()

    def gathered(self):
        """The parameters as the model reads them, which in stage 3 are gathered here and freed again."""
        if self.zero.gatherer:
            self.zero.gatherer.gather_all()
        values = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        if self.zero.gatherer:
            for flat in self.zero.flat_params:
                self.zero.free(flat)
        return values


# -- values ------------------------------------------------------------------------------------------------------------


def compare_with_one_process(world, stage) -> tuple[float, list[set]]:
    """Compare each step's gradients, norm and parameters; return the shards' elements by name, and unused names."""
    sharded = Sharded(world, stage)
    gradients, norms, end = train_alone(Net(0), STEPS)
    unused = []
    for step in range(STEPS):
        sharded.run_backward(micro_batches_of(step, world.rank, world.size))
        sharded.zero.finish_reductions()
        total = torch.zeros(1, dtype=torch.float64)
        unused.append({name for name, grad in sharded.zero.gradients().items() if grad is None})
        for name, grad in sharded.zero.gradients().items():
            if grad is not None:
                boxes = sharded.zero.master_specs[name].boxes
                expected = torch.cat([gradients[step][name][box.slices].flatten() for box in boxes])
                torch.testing.assert_close(grad, expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
                total += grad.square().sum()
        torch.distributed.all_reduce(total) if world.size > 1 else None
        assert total.sqrt().item() == pytest.approx(norms[step], rel=1e-11)
        sharded.zero.step(sharded.optimizer)  # reduces nothing again: each flat gradient has been reduced
    for name, value in sharded.gathered().items():
        torch.testing.assert_close(value, end[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
    covered = sum(spec.numel for spec in sharded.zero.master_specs.values())
    return covered, unused


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_norm_and_parameters_equal_one_process(ranks, world, stage):
    by_rank = ranks(compare_with_one_process, world, stage)
    assert sum(covered for covered, _ in by_rank) == sum(p.numel() for p in Net(0).parameters())
    for step in range(STEPS):  # `rare` is used on the last rank only, and `never` on none
        assert set().union(*(unused[step] for _, unused in by_rank)) == {"never"}


def train_three_ways(world) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters after training by FSDP2, by DDP with torch's ZeroRedundancyOptimizer, and by each stage."""
    mesh, results = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu"), {}
    for kind in ("FSDP2", "ZeroRedundancyOptimizer"):
        model = Net(0)
        if kind == "FSDP2":
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        else:
            model.never.requires_grad = model.rare.requires_grad = False  # DDP would give them gradients of zero
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
            wrapped = nn.parallel.DistributedDataParallel(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            data = torch.cat(unused_rare(step, world))
            (world.size * loss_of(wrapped, data)).backward()  # both take the mean over the ranks
            optimizer.step()
        full = {name: p.full_tensor() if kind == "FSDP2" else p for name, p in model.named_parameters()}
        results[kind] = {name: value.detach().clone() for name, value in full.items()}
    for stage in STAGES:
        sharded = Sharded(world, stage)
        for step in range(STEPS):
            sharded.run_backward(unused_rare(step, world))
            sharded.zero.step(sharded.optimizer)
        results[f"stage {stage}"] = sharded.gathered()
    return results


def unused_rare(step, world):
    """All samples but the last: FSDP2's ranks do not agree on collectives if only some of them use a parameter."""
    return micro_batches_of(step, world.rank, world.size)[:2]


def test_all_stages_train_as_torchs_own(ranks):
    for results in ranks(train_three_ways, 2):
        for other in ("FSDP2", "ZeroRedundancyOptimizer"):
            for stage in STAGES:
                for name, value in results[f"stage {stage}"].items():
                    torch.testing.assert_close(value, results[other][name], **EXACT)


def differences_from_the_fast_version(world, cases) -> list[float]:
    """The largest difference of any parameter after two steps of the trainer, for each (stage, micro-batches)."""
    found = []
    for stage, micro_batches in cases:
        values = []
        for version in ("fast", "simple"):
            config = make_config(world.size, stage if version == "fast" else 0, "fp64", micro_batches)
            engine = build_engine(world, config)
            if version == "simple":
                names, layers = list(engine.parameters), engine.model.model.layers
                blocks = {layer: [n for n in names if block_index(n) == i] for i, layer in enumerate(layers)}
                simple = STAGES[stage](engine.model, blocks, engine.groups["grads"])
                parallel = dataclasses.replace(engine.parallel, reducer=simple)
                for parameter in engine.model.parameters():
                    parameter._post_accumulate_grad_hooks.clear()  # those of the engine with another reducer
                engine = Engine(parallel, engine.groups, config.optim, 0)
            for step in range(2):
                engine.step(step, local_micro_batches(world, config, step), 0.01)
            if stage == 3:
                engine.reducer.gatherer.gather_all()
            values.append(torch.cat([p.detach().flatten() for p in engine.model.parameters()]))
        found.append((values[0] - values[1]).abs().max().item())
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_trainer_gets_the_fast_versions_parameters(ranks, world):
    cases = [(stage, micro_batches) for stage in STAGES for micro_batches in (1, 2)]
    for found in ranks(differences_from_the_fast_version, world, cases):
        assert max(found) < 1e-12, dict(zip(cases, found, strict=True))  # float64, parameters up to 1, lr 0.01


# -- memory ------------------------------------------------------------------------------------------------------------

BLOCK, OTHERS = 82, 4 * 5 + 10 + 12 + 2 + 7  # elements


def padded(numel, size):
    return -(-numel // size) * size


def held_by(world, stage) -> dict[str, list[int]]:
    """Elements of each kind of tensor that this rank holds: during the backward of each block, then at the update."""
    sharded = Sharded(world, stage)
    zero, model = sharded.zero, sharded.model
    inside = {"forward": [], "backward": [], "gradients": []}

    def full_params():
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        return sum(storages.values()) // 8

    def gradients():
        return sum(g.numel() for g in [*zero.grads.values(), *(f.grad for f in zero.flat_params)] if g is not None)

    for layer in reversed(model.layers):  # `up` runs first in forward, `down` first in backward
        layer.up.register_forward_hook(lambda *_: inside["forward"].append(full_params()))
        layer.down.register_full_backward_pre_hook(
            lambda *_: inside["backward"].append(full_params()) or inside["gradients"].append(gradients())
        )
    loss_of(model, batch_of(0)[-1:]).backward()  # one micro-batch on every rank
    zero.finish_micro_batch()
    inside["after backward"] = [full_params(), gradients()]
    zero.finish_reductions()
    inside["update"] = [gradients()]
    zero.step(sharded.optimizer)
    moments = [t for state in sharded.optimizer.state.values() for t in state.values() if t.dim()]
    inside["after the step"] = [full_params(), gradients(), sum(t.numel() for t in moments)]
    inside["shards"] = [flat.shard.untyped_storage().nbytes() // 8 for flat in zero.flat_params]
    return inside


@pytest.mark.parametrize("world", [1, 2, 3, *exhaustive(4)])
@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_holds_what_the_paper_says(ranks, world, stage):
    """Elements at each moment: full parameters, gradients that are not freed yet, and AdamW's two moments per shard."""
    block, others = padded(BLOCK, world), padded(OTHERS, world)
    full, shard = 3 * block + others, (3 * block + others) // world
    waiting = 10 + 12 + 2  # norm, head and rare: complete before the last block's backward begins
    reduced = block // world if stage > 1 else BLOCK
    by_rank = ranks(held_by, world, stage)
    for seen in by_rank:
        running = [block + others] * 3 if stage == 3 else [full] * 3
        assert seen["forward"] == seen["backward"] == running
        assert seen["gradients"] == [waiting, waiting + reduced, waiting + 2 * reduced]
        used = 3 * BLOCK + OTHERS - 7  # `never` has no gradient
        assert seen["after backward"] == [0 if stage == 3 else full, shard if stage > 1 else used]
        assert seen["update"] == [shard]
        assert seen["after the step"][:2] == [0 if stage == 3 else full, 0]
        assert seen["shards"] == [n // (world if stage == 3 else 1) for n in (block, block, block, others)]
    assert sum(seen["after the step"][2] for seen in by_rank) == 2 * used
    assert all(seen["after the step"][2] <= 2 * shard for seen in by_rank)


# -- interface ---------------------------------------------------------------------------------------------------------


def lay_out(world) -> list:
    """A flat parameter of 5, 4 and 1 elements: its length, this rank's shard and slices, and boxes by name."""
    group = bind(world, Mesh(dp=world.size), [GroupSpec("grads", ("dp",))])["grads"]
    shapes = {"a": (5,), "b": (2, 2), "c": (1,)}
    start = torch.arange(10, dtype=torch.float64).split([5, 4, 1])
    parameters = {name: nn.Parameter(start[i].view(shape).clone()) for i, (name, shape) in enumerate(shapes.items())}
    flat = FlatParameter(parameters, group)
    assert all(p.untyped_storage().data_ptr() == flat.full.untyped_storage().data_ptr() for p in parameters.values())
    assert [p.tolist() for p in parameters.values()] == [[0, 1, 2, 3, 4], [[5, 6], [7, 8]], [9]]
    boxes = {name: [(box.start, box.stop) for box in spec.boxes] for name, spec in flat.specs.items()}
    return [
        flat.full.tolist(),
        flat.shard.tolist(),
        {name: (s.start, s.stop) for name, s in flat.slices.items()},
        boxes,
    ]


def test_shards_of_a_flat_parameter(ranks):
    full, shards, slices, boxes = zip(*ranks(lay_out, 3), strict=True)
    assert full == ([*range(10), 0, 0],) * 3
    assert shards == ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0])
    assert slices == ({"a": (0, 4)}, {"a": (0, 1), "b": (1, 4)}, {"b": (0, 1), "c": (1, 2)})
    assert boxes[1] == {"a": [((4,), (5,))], "b": [((0, 0), (1, 2)), ((1, 0), (2, 1))]}


def add_late_gradients(world, stage) -> list[str]:
    """What is raised for a gradient after mark_ready, and after the reduction of its flat parameter."""
    zero, said = Sharded(world, stage).zero, []
    zero.accumulate("head.bias", torch.ones(2, dtype=torch.float64))
    zero.mark_ready("head.bias")
    zero.reduce_until(1)
    for name in ("head.bias", "layers.2.up.bias"):
        with pytest.raises(RuntimeError) as error:
            zero.accumulate(name, torch.ones_like(zero.flat_params[0].parameters.get(name, torch.ones(2))))
        said.append(str(error.value))
    zero.clear_gradients()
    zero.accumulate("layers.2.up.bias", torch.ones(7, dtype=torch.float64))  # of the next step
    return said


def test_a_late_gradient_is_refused(ranks):
    for said in ranks(add_late_gradients, 2, 2):
        assert [text.split(" came ")[0] for text in said] == [
            "a gradient of head.bias",
            "a gradient of layers.2.up.bias",
        ]
