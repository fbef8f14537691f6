"""The configuration: typed, one docstring per field (which is its help), checked before any rank starts.

A value comes from, later winning: the default here, a TOML file (`--config FILE`), the command line
(`--section.field value`).
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig

ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"]


@dataclass(frozen=True)
class MeshConfig:
    """The grid of ranks, outermost axis first. Their product is the number of ranks."""

    pp: int = 1
    """Pipeline stages."""
    dp: int | None = None
    """Data-parallel replicas; all ranks that the other axes leave when not given."""
    cp: int = 1
    """Parts a sequence is cut into (context parallelism)."""
    tp: int = 1
    """Parts an operator is cut into (tensor parallelism)."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the axes of the mesh do their work."""

    schedule: ScheduleKind = "1f1b"
    """In which order pipeline stages work; `minidist simulate` shows each."""
    chunks: int | None = None
    """Parts of the model on each stage: interleaved takes 2 (when not given) or more, zb-v 2, the others 1."""
    sequence: bool = False
    """Share the sequence over tp between the operators (sequence parallelism): the same bytes sent, less memory."""
    context: Literal["ring", "ulysses"] = "ring"
    """How attention sees a sequence cut over cp. ring: keys and values go round. ulysses: heads are exchanged."""


@dataclass(frozen=True)
class ZeroConfig:
    """What data-parallel ranks share out instead of holding it all alike (ZeRO, arXiv 1910.02054)."""

    stage: Literal[0, 1, 2, 3] = 0
    """0: nothing. 1: the optimizer's states and master weights. 2: and the gradients. 3: and the parameters."""
    keep_gradients: bool = False
    """Stage 2: hold whole gradients over the micro-batches of a step and reduce them once, instead of reducing shards
    in each: fewer bytes sent, more memory. Without micro-batches it changes nothing."""
    keep_last_block: bool = True
    """Stage 3: the part of the model whose backward comes right after its forward stays gathered in between."""
    prefetch: bool = True
    """Stage 3: gather the next block while this one computes."""
    shard: int | None = None
    """Ranks that share one set of shards; all of dp x cp when not given. With fewer, dp / shard of cp ranks each hold
    the same shards (hybrid sharding: sharded inside a node, replicated across nodes)."""
    offload: bool = False
    """On CUDA: master weights and the optimizer's states live in the host's memory, where the update runs."""

    @property
    def shares_gradients(self) -> bool:
        """Whether a rank keeps gradients of its shards only, and so reduces them in every micro-batch."""
        return self.stage == 3 or (self.stage == 2 and not self.keep_gradients)

    def shard_group_size(self, mesh: Mesh) -> int:
        """Number of ranks that one set of shards is divided over; 1 at stage 0, which shards nothing."""
        return (self.shard or mesh.dp * mesh.cp) if self.stage else 1


Dtype = Literal["fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class PrecisionConfig:
    """In which number format each thing is; `minidist/precision/policy.py` says what a policy stands for."""

    policy: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """fp32, fp64: everything. bf16, fp16: compute and parameters, with fp32 for sums and for the masters."""
    compute: Dtype | None = None
    """Of activations and matrix products; that of the policy when not given, and so are the others."""
    parameter: Dtype | None = None
    """Of the parameters that forward and backward read."""
    grad_accum: Dtype | None = None
    """In which gradients of micro-batches are added up."""
    reduce: Dtype | None = None
    """In which gradients go from rank to rank; that of grad_accum when not given."""
    master: Literal["fp64", "fp32", "stochastic"] | None = None
    """Of the copy that the optimizer updates, and of its states. stochastic: no copy; an updated parameter is rounded
    up or down at random, so that small updates count on average (bf16)."""
    loss_scale: Literal["auto", "dynamic", "none"] = "auto"
    """dynamic: the loss is multiplied so that small gradients are not lost; halved on overflow. auto: for fp16 only."""
    initial_scale: float = 65536.0
    """Loss scale at the start."""
    growth_interval: int = 2000
    """Steps without overflow after which the scale is doubled."""
    max_overflows: int = 20
    """So many steps skipped one after another end the run."""


@dataclass(frozen=True)
class DataConfig:
    """What is learned from, and how it is cut."""

    source: Literal["stdlib", "synthetic"] = "stdlib"
    """stdlib: the Python standard library's own sources, byte by byte. synthetic: a pinned text of known entropy."""
    path: Path | None = None
    """A text file, or a folder of text files, to learn from instead."""
    seq_len: int = 128
    """Tokens per sample."""
    shares: tuple[float, ...] | None = None
    """Part of the global batch each data-parallel rank gets, for machines of unequal speed; equal when not given."""
    weights: tuple[float, ...] | None = None
    """w_i of each data-parallel rank's data in theta <- theta - lr * sum_i w_i * grad_i; all 1 when not given."""
    min_length: int | None = None
    """Pad: give every sample a pseudo-random length from this to seq_len and ignore what is beyond."""


@dataclass(frozen=True)
class OptimConfig:
    """The update rule and the learning rate."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """adamw: Loshchilov and Hutter 2019. sgd: plain, or with momentum. muon: Jordan et al. 2024, for the matrices of
    the layers, with adamw for all else."""
    lr: float = 3e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW and Muon; L2 penalty of SGD."""
    decay: Literal["all", "matrices"] = "all"
    """Which parameters weight decay holds for. matrices: those of two dimensions or more, not the norms."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    momentum: float = 0.0
    """Momentum of SGD."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""
    muon_lr_ratio: float = 1.0
    """Learning rate of Muon's matrices, as a multiple of that of all else; 1 suits, as updates are of equal size."""
    muon_steps: int = 5
    """Newton-Schulz iterations of a Muon update."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; none: never."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to the end; wsd: constant, then linear decay over the last part; constant."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_fraction: float = 0.1
    """Learning rate at the end, as a fraction of the peak (cosine and wsd)."""
    decay_fraction: float = 0.2
    """Last part of the steps in which wsd decays."""


@dataclass(frozen=True)
class CommConfig:
    """How ranks talk."""

    backend: Literal["auto", "gloo", "nccl", "shm"] = "auto"
    """auto: nccl for one rank per GPU, else shm on Linux and gloo elsewhere. shm: shared memory between the ranks of
    one machine; it talks over gloo, and says so, where the ranks are on several."""
    gradients: Literal["bucketed", "naive"] = "bucketed"
    """bucketed: all-reduce in buckets while backward runs. naive: one all-reduce per parameter after backward."""
    algorithm: Literal["backend", "naive", "tree", "ring", "doubling", "rabenseifner"] = "backend"
    """Of the gradients' all-reduce. backend: the library's own. The others are those of minidist/comm/algorithms, on
    send and receive only; they run when backward is over."""
    bucket_mib: float = 25.0
    """Largest gradient bucket in MiB (2**20 bytes); without ZeRO the first is at most 1 MiB, to leave early."""
    timeout_s: float = 600.0
    """After this many seconds in one operation the run is given up."""


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at once, and how often to look."""

    steps: int = 600
    """Optimizer steps."""
    global_batch: int = 32
    """Samples per step, over all ranks."""
    micro_batches: int = 1
    """Parts in which each rank goes through its share of the global batch. With a pipeline they are its micro-batches,
    without one gradients accumulate over them."""
    seed: int = 1234
    """Of initial values, data order and dropout."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 100
    """Steps between evaluations on held-out text; 0: only at the end."""
    eval_samples: int = 256
    """Held-out samples per evaluation."""
    sample_tokens: int = 200
    """Tokens of text written at the end; 0: none."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What survives."""

    every: int = 200
    """Steps between checkpoints; 0: only at the end and on a stop."""
    keep: int = 3
    """Checkpoints kept; older ones are removed."""
    resume: Path | None = None
    """A checkpoint, or a run folder whose newest checkpoint to go on from."""


@dataclass(frozen=True)
class TraceConfig:
    """Some steps recorded on every rank, to look at: who computed, communicated or waited, and when."""

    file: Path | None = None
    """Where to write them, as a Chrome trace; `--trace FILE` for short. None: no trace."""
    first: int | None = None
    """The first recorded step; the first of this run when not given, which also warms up."""
    steps: int = 10
    """How many are recorded. Until they are over each rank holds them in memory: some 1.5 kB per operation."""


@dataclass(frozen=True)
class MemoryConfig:
    """One step measured on every rank: what its memory consists of where it is most, beside what was estimated."""

    file: Path | None = None
    """Where to draw it, a .png, .svg or .pdf; the numbers go beside it, in a .json of the same name. `--memory FILE`
    for short. None: nothing is measured."""
    step: int | None = None
    """The step that is measured; the second of this run when not given, as the first makes the optimizer's states."""


@dataclass(frozen=True)
class Config:
    """A training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    recompute: Literal["none", "block", "selective"] = "none"
    """What backward computes again instead of keeping it. block: every layer, from its input. selective: attention."""
    compile: bool = False
    """Compile every layer with torch.compile."""
    device: str = "auto"
    """cpu; cuda: a GPU per rank; cuda:0: this GPU for all ranks; auto: cuda where there are enough GPUs, else cpu."""
    folder: Path | None = None
    """Run folder: metrics.jsonl, config.toml, loss.png, checkpoints. The next free runs/0001 when not given."""

    def mesh_of(self, world_size: int) -> Mesh:
        """The mesh for that many ranks. Raises UserError when they do not fill it."""
        m = self.mesh
        for axis, size in dataclasses.asdict(m).items():
            if size is not None and size < 1:
                raise UserError(f"mesh.{axis} is {size}; a mesh axis is at least 1. Give --mesh.{axis} 1 or more.")
        model = m.pp * m.cp * m.tp  # ranks that one replica of the model takes
        dp = max(1, world_size // model) if m.dp is None else m.dp
        if dp * model != world_size:
            needed = dp * model
            if world_size == 1 or m.dp is None:
                hint = f'start with torchrun or "--ranks {needed}"'
            elif world_size % model == 0:
                hint = f'set --mesh.dp {world_size // model}, or start with torchrun or "--ranks {needed}"'
            else:
                hint = f'start with torchrun or "--ranks {needed}"'
            raise UserError(
                f"the mesh pp={m.pp} x dp={dp} x cp={m.cp} x tp={m.tp} needs {needed} ranks, "
                f"the world has {world_size}: {hint}."
            )
        return Mesh(pp=m.pp, dp=dp, cp=m.cp, tp=m.tp)
