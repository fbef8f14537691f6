"""Contenders of `python -m bench model`: tensor, pipeline and context parallelism, by minidist and by torch.

All contenders take the same training step, as a careful user of each library writes it: loss sum divided by the token
count, gradient norm over all ranks, clipping, fused AdamW, loss known on every rank.

Context parallelism has no contender by torch: on the CPU, `torch.distributed.tensor.experimental.context_parallel` of
torch 2.13 raises NotImplementedError in attention ("_scaled_dot_product_flash_attention_for_cpu.default does not have a
sharding strategy registered"). Its baseline is one process that trains alone.
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

from bench.contenders import NO_COMMUNICATION, ContenderContext, NoCommunication
from bench.workload import RankBatch, Workload, optimizer_kernel
from minidist.comm import Meter, World, bind
from minidist.config import Config, MeshConfig, ParallelConfig, TrainConfig
from minidist.data.loader import Batch, Loader
from minidist.mesh import Mesh
from minidist.models.transformer import cross_entropy_sum
from minidist.parallel.pipeline.schedules import pipeline_schedule
from minidist.parallelize import assign_layers
from minidist.tools.parity.engines import ParityEngine, SimpleParityEngine

ONE_PROCESS = "one process"  # name of the contender `OneProcess`
LossAndNorm = tuple[float, float]  # gradient norm before clipping


class BatchRange(NamedTuple):
    """The global batch of one step: `size` samples of the loader, starting at sample `position`."""

    loader: Loader
    position: int
    size: int

    def global_batch(self) -> Batch:
        """Return all samples as one batch."""
        return self.loader.global_batch(self.position, self.size)

    def micro_batches(self, rank: int, ranks: int, count: int) -> list[Batch]:
        """Return the part of one of `ranks` data-parallel ranks as `count` micro-batches."""
        return self.loader.micro_batches(self.position, self.size, rank, ranks, count)


class Minidist:
    """One of minidist's engines on any mesh, as `minidist train` drives it."""

    exact, engine_class = True, ParityEngine

    def __init__(self, work: Workload, world: World, mesh: Mesh, parallel: ParallelConfig, micro_batches: int = 1):
        self.micro_batches, self.steps, self.lr = micro_batches, 0, work.optim.lr
        config = Config(
            model=work.model,
            mesh=MeshConfig(**mesh.sizes),
            parallel=parallel,
            optim=work.optim,
            train=TrainConfig(micro_batches=micro_batches, seed=work.seed),
        )
        groups = bind(world, mesh, self.engine_class.group_specs(mesh, config), meter=Meter(keep=False))
        self.engine = self.engine_class(work.build_model(), groups, config).engine
        self.kernel = optimizer_kernel(self.engine.optimizer)

    def step(self, batch_range: BatchRange) -> LossAndNorm:
        """Train one step on a global batch; return loss and gradient norm before clipping, both global."""
        self.steps += 1
        batches = batch_range.micro_batches(0, 1, self.micro_batches)
        result = self.engine.step(self.steps, batches, self.lr)
        return result.loss, result.grad_norm


class SimpleMinidist(Minidist):
    """The simple engine, in place of the fast one."""

    engine_class = SimpleParityEngine


class PartOfBatch:
    """Training without communication, each rank on its part of the batch: a lower bound on the step time."""

    exact = False

    def __init__(self, work: Workload, world: World):
        self.trainer, self.world = NoCommunication(ContenderContext(work, "full", world)), world
        self.kernel = self.trainer.kernel

    def step(self, batch_range):
        """Train one step on a global batch; return loss and gradient norm before clipping, both global."""
        (batch,) = batch_range.loader.micro_batches(
            batch_range.position, batch_range.size, self.world.rank, self.world.size, 1
        )
        return self.trainer.step(RankBatch(batch, batch.num_loss_tokens))


class OneProcess:
    """Rank 0 alone trains on the whole batch; the other ranks are idle."""

    exact = False  # on the idle ranks, `step` has no loss to compare

    def __init__(self, work: Workload, world: World):
        self.rank, self.trainer = world.rank, NoCommunication(ContenderContext(work, "full", world))
        self.trainer.size = 1  # no average over ranks follows backward, so the loss is not multiplied by their number
        self.kernel = self.trainer.kernel

    def step(self, batch_range):
        """Train one step on a global batch; return loss and gradient norm before clipping, on rank 0 only."""
        if self.rank > 0:
            return None
        batch = batch_range.global_batch()
        return self.trainer.step(RankBatch(batch, batch.num_loss_tokens))


class TorchTensorParallel:
    """torch's DTensor tensor parallelism with vocabulary-parallel embedding and head, and `loss_parallel`.

    sequence: SequenceParallel norms, with activations sharded along the sequence between layers.
    """

    exact = True

    def __init__(self, work: Workload, world: World, sequence: bool = False):
        self.work, self.model = work, work.build_model()
        _parallelize(self.model, init_device_mesh("cpu", (world.size,)), sequence)
        # Fused AdamW and `get_total_norm` do not accept DTensors and plain tensors in one call.
        parameters = list(self.model.parameters())
        by_type = [[p for p in parameters if isinstance(p, DTensor) is is_dtensor] for is_dtensor in (False, True)]
        self.groups = [group for group in by_type if group]
        self.optimizer = work.build_adamw([{"params": group} for group in self.groups])
        self.kernel = optimizer_kernel(self.optimizer)
        self.model.train()

    def step(self, batch_range):
        """Train one step on a global batch; return loss and gradient norm before clipping, both global."""
        batch = batch_range.global_batch()
        with loss_parallel():
            loss_sum, _ = self.model(batch.tokens, batch.labels)
            loss = loss_sum / batch.num_loss_tokens
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


def _parallelize(model: nn.Module, mesh, sequence: bool) -> None:
    """Parallelize a model with Llama's parameter names as torch's tutorial on tensor parallelism does."""
    layout = Shard(1) if sequence else Replicate()  # of the activations between blocks
    output = {"output_layouts": layout}
    for layer in model.model.layers:
        plan = {
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            "self_attn.o_proj": RowwiseParallel(**output),
            **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
            "mlp.down_proj": RowwiseParallel(**output),
        }
        if sequence:
            plan |= {
                "input_layernorm": SequenceParallel(use_local_output=True),
                "post_attention_layernorm": SequenceParallel(use_local_output=True),
                "self_attn": PrepareModuleInput(
                    input_layouts=(layout, None), desired_input_layouts=(Replicate(), None)
                ),
                "mlp": PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=(Replicate(),)),
            }
        parallelize_module(layer, mesh, plan)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **output),
        "lm_head": ColwiseParallel(input_layouts=layout, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan["model.norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, plan)


class _StageModule(nn.Module):
    """Consecutive layers; the first stage has the embedding too, the last the final norm and the head."""

    def __init__(self, model: nn.Module, layers: range, seq_len: int):
        super().__init__()
        self.embedding = model.model.embed_tokens if layers.start == 0 else None
        self.layers = nn.ModuleList(model.model.layers[i] for i in layers)
        last = layers.stop == len(model.model.layers)
        self.norm, self.head = (model.model.norm, model.lm_head) if last else (None, None)
        self.rotary = model.model.rotary_tables(torch.arange(seq_len), torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden, self.rotary)
        return hidden if self.head is None else self.head(self.norm(hidden))


class TorchPipeline:
    """torch.distributed.pipelining, with minidist's assignment of layers to stages.

    schedule: "gpipe", "1f1b" or "interleaved".
    """

    exact = True
    SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}

    def __init__(self, work: Workload, world: World, schedule: str, micro_batches: int):
        config = Config(
            model=work.model, parallel=ParallelConfig(schedule=schedule), train=TrainConfig(micro_batches=micro_batches)
        )
        plan, model = pipeline_schedule(config, Mesh(pp=world.size)), work.build_model()
        layers = assign_layers(work.model, plan, work.seq_len)
        positions = [plan.position(world.rank, chunk) for chunk in range(plan.num_chunks)]
        self.modules = [_StageModule(model, layers[position], work.seq_len) for position in positions]
        stages = [
            PipelineStage(module, position, plan.num_parts, torch.device("cpu"))
            for module, position in zip(self.modules, positions, strict=True)
        ]
        self.work, self.rank, self.count = work, world.rank, 1
        self.first, self.last = 0 in positions, plan.num_parts - 1 in positions
        self.schedule = self.SCHEDULES[schedule](
            stages if plan.num_chunks > 1 else stages[0], micro_batches, loss_fn=self._loss, scale_grads=False
        )
        self.parameters = [p for module in self.modules for p in module.parameters()]
        self.optimizer = work.build_adamw(self.parameters)
        self.kernel = optimizer_kernel(self.optimizer)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a micro-batch: its sum over tokens, over the token count of the global batch."""
        return cross_entropy_sum(logits, labels)[0] / self.count

    def step(self, batch_range):
        """Train one step on a global batch; return loss and gradient norm before clipping, both global."""
        batch = batch_range.global_batch()
        self.count, losses = batch.num_loss_tokens, []
        inputs = (batch.tokens,) if self.first else ()
        self.schedule.step(*inputs, **({"target": batch.labels, "losses": losses} if self.last else {}))
        loss = sum((loss.detach().double() for loss in losses), torch.zeros((), dtype=torch.float64))
        squared = torch.stack(torch._foreach_norm([p.grad for p in self.parameters])).double().square().sum()
        sums = torch.stack([loss, squared])
        dist.all_reduce(sums)
        loss, norm = sums[0], sums[1].sqrt()
        clip_grads_with_norm_(self.parameters, self.work.clip_norm, norm.float())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()


Makers = dict[
    str, Callable[[Workload, World], "Minidist | PartOfBatch | OneProcess | TorchTensorParallel | TorchPipeline"]
]

TENSOR_PARALLEL: Makers = {
    "tp": lambda work, world: Minidist(work, world, Mesh(tp=world.size), ParallelConfig()),
    "tp sequence": lambda work, world: Minidist(work, world, Mesh(tp=world.size), ParallelConfig(sequence=True)),
    "tp simple": lambda work, world: SimpleMinidist(work, world, Mesh(tp=world.size), ParallelConfig()),
    "tp sequence simple": lambda work, world: SimpleMinidist(
        work, world, Mesh(tp=world.size), ParallelConfig(sequence=True)
    ),
    "DTensor": TorchTensorParallel,
    "DTensor sequence": lambda work, world: TorchTensorParallel(work, world, sequence=True),
    NO_COMMUNICATION: PartOfBatch,
}


def pipeline_makers(schedule: str, micro_batches: int) -> Makers:
    """Return the constructors of minidist's and torch's contenders for one pipeline schedule, by name."""
    config = ParallelConfig(schedule=schedule)
    makers: Makers = {
        schedule: lambda work, world: Minidist(work, world, Mesh(pp=world.size), config, micro_batches),
        f"torch {schedule}": lambda work, world: TorchPipeline(work, world, schedule, micro_batches),
    }
    if schedule in ("gpipe", "1f1b"):
        makers[f"{schedule} simple"] = lambda work, world: SimpleMinidist(
            work, world, Mesh(pp=world.size), config, micro_batches
        )
    return makers


BASELINES: Makers = {ONE_PROCESS: OneProcess, NO_COMMUNICATION: PartOfBatch}


def context_parallel_makers() -> Makers:
    """Return the constructors of minidist's context parallelism, ring and Ulysses, and of its baselines, by name."""
    makers: Makers = dict(BASELINES)
    for kind in ("ring", "ulysses"):
        config = ParallelConfig(context=kind)
        makers[kind] = lambda work, world, config=config: Minidist(work, world, Mesh(cp=world.size), config)
        makers[f"{kind} simple"] = lambda work, world, config=config: SimpleMinidist(
            work, world, Mesh(cp=world.size), config
        )
    return makers


def mesh_makers(mesh: Mesh, micro_batches: int) -> Makers:
    """Return the constructors of minidist's engines on a mesh of several axes, and of its baselines, by name."""
    return {
        "mesh": lambda work, world: Minidist(work, world, mesh, ParallelConfig(), micro_batches),
        "mesh simple": lambda work, world: SimpleMinidist(work, world, mesh, ParallelConfig(), micro_batches),
        **BASELINES,
    }
