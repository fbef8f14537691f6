"""Training steps of the simple trainer in small layouts beside one process in float64, which has no code in common.

For the exercises that build the layout and the step. All layouts of a world size train on the same samples, so that one
reference serves them; samples have labels of different lengths, and every rank begins with other values.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exercises.small_trainer import bind_once
from exercises.testing import Wrong, expect
from minidist.comm import Groups, World
from minidist.config import (
    CommConfig,
    Config,
    ConsistencyConfig,
    DataConfig,
    MeshConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    ZeroConfig,
)
from minidist.data.loader import IGNORE_INDEX, Batch
from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parameters import ParamSpec
from minidist.simple.parallelize import group_specs

SEQ, VOCAB, SEED = 8, 20, 3
RATES = (0.02, 0.01, 0.03)  # learning rates of the steps
TOLERANCE = 1e-11  # sums of a few hundred terms in float64, in another order
FROZEN = ("model.layers.0.post_attention_layernorm.weight", "model.layers.2.mlp.up_proj.weight")
UNUSED = "model.unused"
_WEIGHTS = (1.0, 0.5)  # of data shards; the second counts half


def make_config(mesh: Mapping[str, int], **changes: Any) -> Config:
    """Return a configuration of a model of three layers in float64: 5 samples and 2 micro-batches per step, AdamW.

    changes: `section__field=value`, or `field=value`.
    """
    config = Config(
        model=ModelConfig(VOCAB, 16, 12, 3, 4, 2, SEQ, tie_embeddings=False),
        mesh=MeshConfig(**mesh),
        data=DataConfig(seq_len=SEQ),
        optim=OptimConfig(kind="adamw", lr=0.5, weight_decay=0.1, decay="matrices", clip_norm=None),
        precision=PrecisionConfig(policy="fp64"),
        parallel=ParallelConfig(),
        zero=ZeroConfig(),
        comm=CommConfig(bucket_mib=0.01),
        consistency=ConsistencyConfig(),
        train=TrainConfig(steps=3, global_batch=5, micro_batches=2, seed=SEED),
    )
    for name, value in changes.items():
        section, _, field = name.partition("__")
        value = dataclasses.replace(getattr(config, section), **{field: value}) if field else value
        config = dataclasses.replace(config, **{section: value})
    return config


def make_model(config: Config, seed: int, frozen: Sequence[str] = (), has_unused: bool = False) -> Transformer:
    """Return the unsplit model. seed: of its values; norms are not all ones, so that a missing one shows."""
    model = Transformer(config.model)
    init_parameters(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.linspace(0.5, 1.5 + seed, parameter.numel()))
            parameter.requires_grad_(name not in frozen)
    if has_unused:
        model.model.unused = nn.Parameter(torch.ones(3, 2))
    return model.double() if config.precision.policy == "fp64" else model


def make_groups(world: World, config: Config) -> Groups:
    """Collective: return the process groups of a layout, made once in this process."""
    mesh = config.mesh_of(world.size)
    return bind_once(world, mesh, group_specs(mesh, config))


def make_samples(step: int, size: int) -> list[Batch]:
    """Return the samples of a step, each as a batch of one. Each has another number of labels in the loss."""
    samples = []
    for index in range(step * size, (step + 1) * size):
        text = torch.randint(VOCAB, (1, SEQ + 1), generator=torch.Generator().manual_seed(100 + index))
        labels = text[:, 1:].clone()
        labels[:, 2 + 3 * index % (SEQ - 1) :] = IGNORE_INDEX
        samples.append(Batch(text[:, :-1], labels, torch.tensor([index])))
    return samples


def join_samples(samples: Sequence[Batch]) -> Batch:
    """Return one batch of samples; without any, a batch of none."""
    empty = torch.empty(0, SEQ, dtype=torch.int64)
    columns = [(each.tokens, each.labels, each.samples) for each in samples]
    parts = zip((empty, empty, torch.empty(0, dtype=torch.int64)), *columns, strict=True)
    return Batch(*map(torch.cat, parts))


def cut(samples: Sequence[Batch], sizes: Sequence[int]) -> list[list[Batch]]:
    """Return consecutive parts of these sizes."""
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [list(samples[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


@dataclasses.dataclass
class Shards:
    """How the samples of each step are divided: how many each data shard has, its weight and its micro-batches.

    silent: the steps in which no label is in the loss.
    """

    config: Config
    sizes: Sequence[int]
    weights: Sequence[float]
    silent: Sequence[int] = ()

    @classmethod
    def of(cls, config: Config, dp: int, silent: Sequence[int] = ()) -> "Shards":
        """Return the usual one: of two data shards the first has 4 samples, and the second one with half the weight."""
        return cls(config, (4, 1) if dp == 2 else (5,), _WEIGHTS[:dp], silent)

    def samples(self, step: int) -> list[list[Batch]]:
        """Return the samples of each data shard."""
        samples = make_samples(step, sum(self.sizes))
        if step in self.silent:
            samples = [Batch(each.tokens, torch.full_like(each.labels, IGNORE_INDEX), each.samples) for each in samples]
        return cut(samples, self.sizes)

    def micro_batches(self, step: int, dp_rank: int) -> list[Batch]:
        """Return the micro-batches of a data shard; one may be empty."""
        samples, number = self.samples(step)[dp_rank], self.config.train.micro_batches
        sizes = [len(samples) // number + (at < len(samples) % number) for at in range(number)]
        return [join_samples(part) for part in cut(samples, sizes)]


class OneProcess:
    """The training of one process: autograd on the unsplit model in float64, and torch's own optimizer.

    tensors: of the last step, by the kinds "gradient" (None if the parameter was not used) and "parameter".
    """

    def __init__(self, shards: Shards, frozen: Sequence[str] = (), has_unused: bool = False):
        self.shards, self.config = shards, shards.config
        self.model = make_model(self.config, 0, frozen, has_unused).double().train()
        self.named = dict(self.model.named_parameters())
        trained = [p for p in self.named.values() if p.requires_grad]
        decayed = {"params": [p for p in trained if p.ndim > 1], "weight_decay": self.config.optim.weight_decay}
        others = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
        optim = self.config.optim
        if optim.kind == "sgd":
            self.optimizer = torch.optim.SGD([decayed, others], 1.0, foreach=False)
        else:
            self.optimizer = torch.optim.AdamW([decayed, others], 1.0, optim.betas, optim.eps, foreach=False)
        self.loss, self.num_tokens, self.norm = None, 0.0, 0.0
        self.gradients: dict[str, Tensor | None] = {}

    def step(self, step: int, lr: float) -> None:
        """Train on all data shards of a step; without any token that counts, change nothing."""
        self.optimizer.zero_grad()
        total, self.num_tokens, self.loss = 0.0, 0.0, None
        for samples, weight in zip(self.shards.samples(step), self.shards.weights, strict=True):
            for each in samples:
                loss_sum, count = self.loss_of(each, step)
                total, self.num_tokens = total + weight * loss_sum, self.num_tokens + weight * int(count)
        if not self.num_tokens:
            self.gradients = dict.fromkeys(self.named)
            self.norm = 0.0
            return
        loss = total / self.num_tokens
        loss.backward()
        self.loss = loss.item()
        self.gradients = {name: None if p.grad is None else p.grad.clone() for name, p in self.named.items()}
        squares = [gradient.square().sum().item() for gradient in self.gradients.values() if gradient is not None]
        self.norm = sum(squares) ** 0.5
        limit = self.config.optim.clip_norm
        if limit is not None and self.norm > limit:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad *= limit / (self.norm + 1e-6)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def loss_of(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of a batch, and the number of its tokens."""
        address = DropoutAddress(SEED, step, batch.samples, torch.arange(SEQ))
        return self.model(batch.tokens, batch.labels, address=address)


def boxes_of(tensor: Tensor, spec: ParamSpec) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield the boxes of a global tensor that a rank has, as slices, with its elements."""
    flat = tensor.detach().flatten()
    for box in spec.boxes:
        yield box.slices, flat[: box.numel].view(box.shape)
        flat = flat[box.numel :]


def expect_boxes(what: str, got: Tensor | None, spec: ParamSpec, wanted: Tensor | None, case: str, tolerance: float):
    """Fail unless a rank's tensor has its elements of the global tensor `wanted`."""
    if got is None or wanted is None:
        expect(f"{what}: whether it is None", got is None, wanted is None, case=case)
        return
    if tuple(spec.shape) != tuple(wanted.shape) or got.numel() != spec.numel:
        what = f"{what} does not have the elements that its spec says"
        told = f"{got.numel()} elements, a spec of {spec.numel} of {tuple(spec.shape)}"
        raise Wrong("wrong", what, f"elements of {tuple(wanted.shape)}", told, case=case)
    for slices, part in boxes_of(got, spec):
        where = ", ".join(f"{each.start}:{each.stop}" for each in slices)
        expect(f"{what}[{where}]", part, wanted.detach()[slices], case=case, tolerance=tolerance)


class Run:
    """Steps of a layout on this rank, compared with those of one process.

    engine: with a `step`. gradients: of the masters, when the reducer has completed the sums.
    """

    def __init__(self, engine: Any, parallel: Any, groups: Groups, shards: Shards):
        self.engine, self.parallel, self.groups, self.shards = engine, parallel, groups, shards
        self.dp_rank = groups.mesh.coords(groups.world.rank)["dp"]
        self.gradients: dict[str, Tensor | None] = {}
        self.spoil = lambda: None  # called when the sums are complete
        parallel.reducer.finish = functools.partial(self._finish, parallel.reducer.finish)

    def _finish(self, finish: Any) -> None:
        finish()
        for name, master in self.parallel.reducer.masters.items():
            self.gradients[name] = None if master.grad is None else master.grad.clone()
        self.spoil()

    def step(self, step: int, lr: float, stop_requested: bool = False) -> Any:
        """Collective: one step of this rank's part of the data; returns the decision."""
        batches = self.shards.micro_batches(step, self.dp_rank)
        return self.engine.step(step, batches, lr, self.shards.weights[self.dp_rank], stop_requested)

    def expect_step(self, one: OneProcess, step: int, case: str, lr: float | None = None) -> None:
        """Collective: fail unless a step has the loss, gradients, norm and parameters of one process."""
        lr = RATES[step] if lr is None else lr
        decision, case = self.step(step, lr), f"{case}; step {step}"
        one.step(step, lr)
        expect("the loss", decision.loss, one.loss, case=case, tolerance=TOLERANCE)
        expect("the number of tokens", decision.num_tokens, one.num_tokens, case=case)
        if one.num_tokens:
            for name, gradient in self.gradients.items():
                spec = self.parallel.master_specs[name]
                expect_boxes(f"the gradient of {name}", gradient, spec, one.gradients[name], case, TOLERANCE)
        expect("the gradient norm", decision.grad_norm, one.norm, case=case, tolerance=TOLERANCE)
        expect("update_successful", decision.update_successful, one.num_tokens > 0, case=case)
        self.expect_parameters(one.named, case)

    def expect_parameters(self, wanted: Mapping[str, Tensor], case: str) -> None:
        """Fail unless masters and parameters have the values of one process."""
        for name, master in self.parallel.reducer.masters.items():
            spec = self.parallel.master_specs[name]
            expect_boxes(f"the master of {name}", master, spec, wanted[name], case, TOLERANCE)
        if self.shards.config.zero.stage < 3:  # stage 3 has no parameters between steps
            for name, parameter in self.parallel.model.named_parameters():
                spec = self.parallel.specs[name]
                expect_boxes(f"the parameter {name}", parameter, spec, wanted[name], case, TOLERANCE)

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of this rank's masters, parameters and optimizer states, by name."""
        reducer, found = self.parallel.reducer, {}
        for name, master in reducer.masters.items():
            found[f"master of {name}"] = master
            found |= {f"{key} of {name}": state for key, state in self.engine.optimizer.state.get(master, {}).items()}
        if self.shards.config.zero.stage < 3:
            found |= {f"parameter {name}": tensor for name, tensor in self.parallel.model.named_parameters()}
        return {name: tensor.detach().clone() for name, tensor in found.items()}
