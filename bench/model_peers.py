"""The contenders of `python -m bench model`: one model on several ranks, ours and torch's own, all with the same step.

A step of each is what a careful user of it writes: the loss sum of the batch over its number of tokens, the gradient
norm over all ranks, clipping, AdamW in its fused kernel, the loss known on every rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bench.contenders import ContenderContext, Floor
from bench.workload import Share, Workload, kernel_of
from minidist.comm import Meter, World, bind
from minidist.config import Config, MeshConfig, ParallelConfig, TrainConfig
from minidist.data.loader import Loader
from minidist.mesh import Mesh
from minidist.models.transformer import cross_entropy_sum
from minidist.parallel.pipeline.schedules import pipeline_schedule
from minidist.parallelize import assign_layers, group_specs, parallelize
from minidist.train.engine import Engine

Numbers = tuple[float, float]  # loss and gradient norm before clipping


class BatchRange(NamedTuple):
    """The global batch of one step: `size` samples of the loader, from `position` on."""

    loader: Loader
    position: int
    size: int


class Ours:
    """minidist's engine on any mesh, as `minidist train` drives it."""

    exact = True

    def __init__(self, work: Workload, world: World, mesh: Mesh, parallel: ParallelConfig, micro_batches: int = 1):
        self.micro_batches, self.steps = micro_batches, 0
        config = Config(
            model=work.model,
            mesh=MeshConfig(**mesh.sizes),
            parallel=parallel,
            optim=work.optim,
            train=TrainConfig(micro_batches=micro_batches),
        )
        groups = bind(world, mesh, group_specs(mesh, config), meter=Meter(keep=False))
        self.engine = Engine(parallelize(work.build(), groups, config), groups, work.optim, work.seed)
        self.kernel = kernel_of(self.engine.optimizer)

    def step(self, at: BatchRange) -> Numbers:
        self.steps += 1
        batches = at.loader.micro_batches(at.position, at.size, 0, 1, self.micro_batches)
        result = self.engine.step(self.steps, batches, self.engine.optim.lr)
        return result.loss, result.grad_norm


class HalfBatch:
    """Every rank alone on its equal part of the batch: what two ranks cannot be faster than."""

    exact = False

    def __init__(self, work: Workload, world: World):
        self.floor, self.world = Floor(ContenderContext(work, "full", world)), world
        self.kernel = self.floor.kernel

    def step(self, at):
        (batch,) = at.loader.micro_batches(at.position, at.size, self.world.rank, self.world.size, 1)
        return self.floor.step(Share(batch, batch.count))


class TorchTensor:
    """DTensor: embedding and head over the vocabulary, `loss_parallel`; with `sequence`, SequenceParallel norms."""

    exact = True

    def __init__(self, work: Workload, world: World, sequence: bool = False):
        self.work, self.model = work, work.build()
        _lay_out(self.model, init_device_mesh("cpu", (world.size,)), sequence)
        kinds = [isinstance(p, DTensor) for p in self.model.parameters()]
        # One kernel call takes tensors of one kind.
        self.groups = [
            [p for p, is_one in zip(self.model.parameters(), kinds, strict=True) if is_one is kind]
            for kind in sorted(set(kinds))
        ]
        self.optimizer = work.adamw([{"params": group} for group in self.groups])
        self.kernel = kernel_of(self.optimizer)
        self.model.train()

    def step(self, at):
        batch = at.loader.global_batch(at.position, at.size)
        with loss_parallel():
            loss_sum, _ = self.model(batch.tokens, batch.labels)
            loss = loss_sum / batch.count
            loss.backward()
        squares = []
        for group in self.groups:
            norm = get_total_norm([p.grad for p in group])
            squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).square())
        norm = torch.stack(squares).sum().sqrt()
        for group in self.groups:
            clip_grads_with_norm_(group, self.work.clip_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return loss.item(), norm.item()


def _lay_out(model: nn.Module, mesh, sequence: bool) -> None:
    """The plan of torch's own tutorial on tensor parallelism, for a model with Llama's names."""
    outside = Shard(1) if sequence else Replicate()
    between = {"output_layouts": outside}
    for layer in model.model.layers:
        plan = {
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            "self_attn.o_proj": RowwiseParallel(**between),
            **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
            "mlp.down_proj": RowwiseParallel(**between),
        }
        if sequence:
            plan |= {
                "input_layernorm": SequenceParallel(use_local_output=True),
                "post_attention_layernorm": SequenceParallel(use_local_output=True),
                "self_attn": PrepareModuleInput(
                    input_layouts=(outside, None), desired_input_layouts=(Replicate(), None)
                ),
                "mlp": PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),)),
            }
        parallelize_module(layer, mesh, plan)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **between),
        "lm_head": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        ends["model.norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, ends)


class _Part(nn.Module):
    """Some consecutive layers, with the embedding or the head when the part is at that end."""

    def __init__(self, model: nn.Module, layers: range, seq_len: int):
        super().__init__()
        self.embedding = model.model.embed_tokens if layers.start == 0 else None
        self.layers = nn.ModuleList(model.model.layers[i] for i in layers)
        last = layers.stop == len(model.model.layers)
        self.norm, self.head = (model.model.norm, model.lm_head) if last else (None, None)
        self.rotary = model.model.rotary(torch.arange(seq_len), torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden, self.rotary)
        return hidden if self.head is None else self.head(self.norm(hidden))


class TorchPipeline:
    """torch.distributed.pipelining, with the parts of the model that ours has."""

    exact = True
    SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}

    def __init__(self, work: Workload, world: World, kind: str, micro_batches: int):
        config = Config(
            model=work.model, parallel=ParallelConfig(schedule=kind), train=TrainConfig(micro_batches=micro_batches)
        )
        made, model = pipeline_schedule(config, Mesh(pp=world.size)), work.build()
        parts = assign_layers(work.model, made, work.seq_len)
        positions = [made.position(world.rank, chunk) for chunk in range(made.chunks)]
        self.parts = [_Part(model, parts[position], work.seq_len) for position in positions]
        stages = [
            PipelineStage(part, position, made.positions, torch.device("cpu"))
            for part, position in zip(self.parts, positions, strict=True)
        ]
        self.work, self.rank, self.count = work, world.rank, 1
        self.first, self.last = 0 in positions, made.positions - 1 in positions
        self.schedule = self.SCHEDULES[kind](
            stages if made.chunks > 1 else stages[0], micro_batches, loss_fn=self._loss, scale_grads=False
        )
        self.parameters = [p for part in self.parts for p in part.parameters()]
        self.optimizer = work.adamw(self.parameters)
        self.kernel = kernel_of(self.optimizer)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_sum(logits, labels)[0] / self.count

    def step(self, at):
        batch = at.loader.global_batch(at.position, at.size)
        self.count, losses = batch.count, []
        given = (batch.tokens,) if self.first else ()
        self.schedule.step(*given, **({"target": batch.labels, "losses": losses} if self.last else {}))
        loss = sum((one.detach().double() for one in losses), torch.zeros((), dtype=torch.float64))
        squared = torch.stack(torch._foreach_norm([p.grad for p in self.parameters])).double().square().sum()
        numbers = torch.stack([loss, squared])
        dist.all_reduce(numbers)
        loss, norm = numbers[0], numbers[1].sqrt()
        clip_grads_with_norm_(self.parameters, self.work.clip_norm, norm.float())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()


Makers = dict[str, Callable[[Workload, World], "Ours | HalfBatch | TorchTensor | TorchPipeline"]]

TENSOR: Makers = {
    "tp": lambda work, world: Ours(work, world, Mesh(tp=world.size), ParallelConfig()),
    "tp sequence": lambda work, world: Ours(work, world, Mesh(tp=world.size), ParallelConfig(sequence=True)),
    "DTensor": TorchTensor,
    "DTensor sequence": lambda work, world: TorchTensor(work, world, sequence=True),
    "half the batch": HalfBatch,
}


def pipeline_makers(kind: str, micro_batches: int) -> Makers:
    how = ParallelConfig(schedule=kind)
    return {
        kind: lambda work, world: Ours(work, world, Mesh(pp=world.size), how, micro_batches),
        f"torch {kind}": lambda work, world: TorchPipeline(work, world, kind, micro_batches),
    }
