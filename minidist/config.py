"""The typed configuration of a training run. The docstring below a field is its help on the command line.

A value comes from the default here, from a TOML file (`--config FILE`) or from the command line
(`--section.field value`); each overrides the one before. `minidist.validation` checks the result before a rank starts.
"""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig

ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"]


@dataclass(frozen=True)
class MeshConfig:
    """The device mesh, outermost axis first. The product of its axes is the number of ranks."""

    pp: int = 1
    """Pipeline parallelism: number of stages that the layers are divided into."""
    dp: int | None = None
    """Data parallelism: number of model replicas; when not given, the ranks that the other axes leave."""
    cp: int = 1
    """Context parallelism: number of ranks that each sequence is sharded over."""
    tp: int = 1
    """Tensor parallelism: number of ranks that each layer's weight matrices are sharded over."""


@dataclass(frozen=True)
class ParallelConfig:
    """The variants of pipeline, tensor and context parallelism; their sizes are in `mesh`."""

    schedule: ScheduleKind = "1f1b"
    """Pipeline schedule: the order of forward and backward passes on each stage. `minidist simulate` draws it."""
    chunks: int | None = None
    """Model chunks per pipeline stage. interleaved: 2 or more (2 when not given). zb-v: 2. The others: 1."""
    sequence: bool = False
    """Sequence parallelism: outside of attention and MLP, shard activations along the sequence over the tp ranks. Sends
    the same number of bytes and needs less memory."""
    context: Literal["ring", "ulysses"] = "ring"
    """Attention under context parallelism. ring: keys and values pass around a ring of ranks. ulysses: an all-to-all
    gives each rank complete sequences for some of the heads."""


@dataclass(frozen=True)
class ZeroConfig:
    """What is sharded across data-parallel ranks instead of replicated (ZeRO, arXiv 1910.02054)."""

    stage: Literal[0, 1, 2, 3] = 0
    """0: nothing is sharded. 1: optimizer states and master weights. 2: gradients, too. 3: parameters, too."""
    keep_gradients: bool = False
    """Stage 2: accumulate unsharded gradients over the micro-batches of a step and reduce them once, instead of
    reducing them in every micro-batch: fewer bytes sent, more memory. No difference with one micro-batch."""
    keep_last_block: bool = True
    """Stage 3: keep the last block gathered between its forward and its backward, which follows at once."""
    prefetch: bool = True
    """Stage 3: all-gather the next block's parameters while the current block computes."""
    shard: int | None = None
    """Number of ranks that one set of shards is divided over; all dp x cp ranks when not given. A smaller number gives
    hybrid sharding: sharded inside each group of ranks (a node, say), replicated across the groups."""
    offload: bool = False
    """On CUDA: keep master weights and optimizer states in host memory, and run the optimizer there."""

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are sharded, so that they are reduced in every micro-batch (stage 3, and 2 by default)."""
        return self.stage == 3 or (self.stage == 2 and not self.keep_gradients)

    def shard_group_size(self, mesh: Mesh) -> int:
        """Number of ranks that one set of shards is divided over; 1 at stage 0, which shards nothing."""
        return (self.shard or mesh.dp * mesh.cp) if self.stage else 1


Dtype = Literal["fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtype of each kind of tensor, and loss scaling."""

    policy: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """fp32, fp64: everything in this dtype. bf16, fp16: mixed precision, with compute and parameters in this dtype and
    gradient sums, master weights and optimizer states in fp32. The options below change single dtypes."""
    compute: Dtype | None = None
    """Dtype of activations and matrix products; the policy's when not given."""
    parameter: Dtype | None = None
    """Dtype of the parameters in forward and backward; the compute dtype when not given."""
    grad_accum: Dtype | None = None
    """Dtype in which the gradients of micro-batches are accumulated; the policy's when not given."""
    reduce: Dtype | None = None
    """Dtype in which gradients are reduced across ranks; the grad_accum dtype when not given."""
    master: Literal["fp64", "fp32", "stochastic"] | None = None
    """Dtype of the master weights and of the optimizer states; the policy's when not given. stochastic: no master
    weights; bf16 parameters are updated with stochastic rounding."""
    loss_scale: Literal["auto", "dynamic", "none"] = "auto"
    """dynamic: multiply the loss so that small gradients do not underflow; halve the scale on overflow. auto: dynamic
    if gradients pass through fp16, else none."""
    initial_scale: float = 65536.0
    """Loss scale of the first step."""
    growth_interval: int = 2000
    """Steps without overflow after which the loss scale is doubled."""
    max_overflows: int = 20
    """End the run after this many consecutive steps were skipped because of overflow."""


@dataclass(frozen=True)
class DataConfig:
    """The training text and how it is divided."""

    source: Literal["stdlib", "synthetic"] = "stdlib"
    """stdlib: the source files of Python's standard library, as bytes. synthetic: generated text of known entropy."""
    path: Path | None = None
    """A text file, or a folder of text files, to train on instead of --data.source."""
    seq_len: int = 128
    """Tokens per sample."""
    shares: tuple[float, ...] | None = None
    """Relative share of the global batch of each data-parallel rank, for machines of unequal speed; equal when not
    given."""
    weights: tuple[float, ...] | None = None
    """Weight w_i of each data-parallel rank's data in theta <- theta - lr * sum_i w_i * grad_i; all 1 by default."""
    min_length: int | None = None
    """Give every sample a pseudo-random length from this to seq_len, and mask the labels beyond it. All samples have
    full length when not given."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and the learning rate schedule."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """adamw: Loshchilov and Hutter 2019. sgd: with or without momentum. muon: Jordan et al. 2024 for the weight
    matrices of the layers, and adamw for all other parameters."""
    lr: float = 3e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW and Muon; L2 penalty of SGD."""
    decay: Literal["all", "matrices"] = "all"
    """Parameters that weight decay applies to. matrices: only those with two or more dimensions, so not the norms."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    momentum: float = 0.0
    """Momentum of SGD."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""
    muon_lr_ratio: float = 1.0
    """Learning rate of Muon's matrices, as a multiple of all other parameters' learning rate. Muon's and AdamW's
    updates have the same RMS, so 1 works."""
    muon_steps: int = 5
    """Newton-Schulz iterations of a Muon update."""
    clip_norm: float | None = 1.0
    """Clip gradients to this global norm; none: no clipping."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine decay to the last step; wsd: constant, then linear decay over the last steps; or
    constant."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_fraction: float = 0.1
    """Learning rate of the last step, as a fraction of the peak (cosine and wsd)."""
    decay_fraction: float = 0.2
    """Fraction of the steps, at the end, over which wsd decays."""


@dataclass(frozen=True)
class CommConfig:
    """How ranks communicate."""

    backend: Literal["auto", "gloo", "nccl", "shm"] = "auto"
    """auto: nccl for one rank per GPU, else shm on Linux and gloo elsewhere. shm: shared memory between the ranks of
    one machine; it falls back to gloo, with a note, if the ranks are on several machines."""
    gradients: Literal["bucketed", "naive"] = "bucketed"
    """bucketed: reduce gradients in buckets, overlapped with backward. naive: one all-reduce per parameter after
    backward."""
    algorithm: Literal["backend", "tree", "ring", "doubling"] = "backend"
    """All-reduce algorithm for gradients: `backend` is the communication library's own. The others are built on send
    and receive (minidist/simple/collectives.py): a tree, a ring, recursive halving and doubling; they need engine
    simple and comm.gradients naive."""
    bucket_mib: float = 25.0
    """Largest gradient bucket in MiB (2**20 bytes). Without ZeRO the first bucket is at most 1 MiB, so that the first
    all-reduce starts early."""
    timeout_s: float = 600.0
    """Abort the run if one operation takes longer than this, in seconds."""
    hang_limit_s: float | None = None
    """If other ranks have waited this many seconds for a rank that is suspended or still computing (not itself
    waiting), kill that rank. The run then recovers or ends, as after the death of any rank. Default: nine tenths of
    comm.timeout-s."""


@dataclass(frozen=True)
class ConsistencyConfig:
    """How the replicas of the model are kept consistent: equal after every step, or merged every h steps."""

    mode: Literal["synchronous", "central", "asynchronous", "stale", "local", "diloco", "gossip"] = "synchronous"
    """synchronous: gradients are summed over all ranks in every step. central: one rank receives the gradients,
    updates, and sends the parameters (parameter server). asynchronous: that rank updates with each single gradient, and
    sends its sender the parameters at once. stale: asynchronous, but no rank gets far ahead of the slowest (SSP, Ho et
    al. 2013). local, diloco and gossip train replicas that differ, and merge them every h steps: local averages the
    parameters (local SGD), diloco makes an outer step along the averaged difference (arXiv 2311.08105), gossip averages
    with neighbours only, and over all replicas after the last step."""
    h: int = 50
    """Steps of each replica between two merges (local, diloco, gossip)."""
    replicas: int | None = None
    """Number of replicas; it divides mesh.dp, and each replica has dp / replicas x pp x cp x tp ranks with ZeRO inside.
    When not given, each data-parallel rank is a replica."""
    outer_lr: float = 0.7
    """Learning rate of diloco's outer step; 1 without momentum gives the same as local, and suits muon better than the
    default, which is for adamw."""
    outer_momentum: float = 0.0
    """Nesterov momentum of diloco's outer step. Momentum raised the loss of short runs with adamw
    (docs/benchmarks.md); the paper has 0.9, for hundreds of merges."""
    exchange: Literal["full", "int8"] = "full"
    """How diloco sends the averaged difference. int8: one byte per value, and a scale for each 256 values; what that
    rounds off is added to the next difference (error feedback, arXiv 1901.09847)."""
    fragments: int = 1
    """Merge the model in this many parts, h / fragments steps apart (Streaming DiLoCo, arXiv 2501.18512)."""
    reset_moments: bool = False
    """Set the optimizer's states of what was merged to zero (local, diloco, gossip)."""
    topology: Literal["ring", "matching"] = "ring"
    """Neighbours of a replica under gossip. ring: the two next to it. matching: one, drawn anew for every merge."""
    server: int = 0
    """The rank that updates the parameters under central, asynchronous and stale."""
    staleness_bound: int = 1
    """Steps that a rank may be ahead of the slowest one under stale; with 0 and plain SGD it is synchronous."""

    def fragment_of(self, name: str) -> int:
        """Return the fragment with which a parameter is merged: layers alternate, everything else is in the last."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return int(layer[1]) % self.fragments if layer else self.fragments - 1

    @property
    def merges_replicas(self) -> bool:
        """Whether replicas train separately and are merged every `h` steps (modes local, diloco and gossip)."""
        return self.mode in ("local", "diloco", "gossip")

    @property
    def quantizes(self) -> bool:
        """Whether a replica sends rounded differences, and keeps what they leave out (mode diloco, exchange int8)."""
        return self.mode == "diloco" and self.exchange == "int8"

    @property
    def is_asynchronous(self) -> bool:
        """Whether each rank pushes gradients and pulls parameters at its own pace (modes asynchronous and stale)."""
        return self.mode in ("asynchronous", "stale")


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run, batch size, logging and evaluation."""

    steps: int = 600
    """Number of optimizer steps."""
    global_batch: int = 32
    """Samples per step over all ranks."""
    micro_batches: int = 1
    """Micro-batches that each rank divides its samples of a step into: for the pipeline or, without one, for gradient
    accumulation."""
    seed: int = 1234
    """Random seed of the initial parameters, the data order and dropout."""
    max_skipped_steps: int = 0
    """Skip the update of a step whose loss or gradient is not finite, in up to this many consecutive steps; one more
    ends the run. 0: the first ends it. Overflow under loss scaling has its own limit, precision.max-overflows."""
    log_every: int = 10
    """Log metrics every this many steps."""
    eval_every: int = 100
    """Evaluate on held-out text every this many steps; 0: only at the end."""
    eval_samples: int = 256
    """Number of held-out samples per evaluation."""
    straggler_threshold: float = 0.25
    """Report the slowest rank if its excess is significantly more than this fraction of the step time and has cost a
    second in all. The excess is the time per step by which the other ranks (their median) wait longer for
    communication. 0: never."""
    sample_tokens: int = 200
    """Tokens to generate as a sample at the end; 0: none."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints, and what to resume from."""

    every: int = 200
    """Save a checkpoint every this many steps; 0: only at the end, and when the run is stopped."""
    keep: int = 3
    """Number of checkpoints to keep; older ones are deleted."""
    keep_every: int = 0
    """Also keep the checkpoints of steps that are multiples of this; 0: none."""
    background: bool = True
    """Write checkpoints while training goes on: a step waits only until its tensors are copied to host memory."""
    remote: str | None = None
    """A URL of a file system that fsspec knows, such as s3://bucket/run: also copy every checkpoint there in the
    background, and resume from there if --folder has nothing newer. Needs fsspec: pip install -e '.[remote]'."""
    resume: Path | None = None
    """Continue from this checkpoint, or from the newest checkpoint of this run folder. auto: from the newest intact
    checkpoint in --folder, or from the start if there is none. When not given: auto under torchrun after a restart, and
    if --folder holds a run with the same options; else a new run."""
    inherit: bool = True
    """With a checkpoint or run folder in checkpoint.resume: options that are not given take their values from the run
    that saved the checkpoint. In Python, an option counts as given if its value is not the default."""


@dataclass(frozen=True)
class FaultConfig:
    """Recovery when a rank dies, detection of silent faults, and injection of a fault, as a test of both.

    `inject` puts one fault into a run. The command `minidist chaos` runs many such trials, with faults drawn at random.
    """

    live_recovery: bool = False
    """When a rank dies, the other ranks go on without it: they take its work, with the training state from their own
    memory, and admit a new rank in its place. For `minidist train --ranks`, not under torchrun."""
    max_restarts: int = 3
    """Live recovery: number of ranks to start in place of dead ones, in all. Afterwards the run goes on with the ranks
    that are left, as long as they fill the mesh."""
    memory_every: int = 10
    """Live recovery: every this many steps, each rank copies its shards to its host memory and to another rank's (in
    another node or replica). A death loses at most these steps. Only ZeRO, layouts with one replica and replicas of
    several ranks that differ (local, diloco, gossip) need copies: otherwise another replica has the state of the last
    step, or goes on with its own. 0: no copies; what is lost comes from a checkpoint."""
    inject: str | None = None
    """One fault, such as "kill rank 1 at step 3 in update". Kinds: kill (SIGKILL), stop (SIGSTOP), slow, nan (in a
    gradient), flip (a bit of a parameter), full (disk). Phases: forward, backward, reduce, agree, update, gather; of a
    save: copy, write, rename. No fault when not given, nor after a restart by torchrun."""
    digest_every: int = 0
    """Compare the replicas of all parameters and optimizer states every this many steps, and before every checkpoint,
    by a hash of their bits; the run ends if they differ. Replicas that train separately (local, diloco) are compared
    after the next merge, diloco's outer states every time; those of gossip, which stay different, only inside. 0:
    never."""
    repair: bool = False
    """If most replicas of a tensor are equal, overwrite the differing ones and go on, instead of ending the run."""


@dataclass(frozen=True)
class TraceConfig:
    """A timeline of some steps: when each rank computed, communicated or waited."""

    file: Path | None = None
    """Write a Chrome trace to this file; `--trace FILE` for short. No trace when not given."""
    first: int | None = None
    """First step to record; the first of this run, which includes warm-up costs, when not given."""
    steps: int = 10
    """Number of steps to record. Each rank keeps them in memory until the last: about 1.5 kB per operation."""


@dataclass(frozen=True)
class MemoryConfig:
    """Options of the memory measurement: the peak of one step, by category, on every rank, beside its estimate."""

    file: Path | None = None
    """Draw a chart to this .png, .svg or .pdf, and write the numbers to a .json of the same name; `--memory FILE` for
    short. No measurement when not given."""
    step: int | None = None
    """Step to measure; the second of this run when not given, as the first one allocates the optimizer states."""


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
    consistency: ConsistencyConfig = field(default_factory=ConsistencyConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    engine: Literal["fast", "simple"] = "fast"
    """fast: the full trainer. simple: the small trainer `minidist/simple`, which the course builds; it has every axis,
    and refuses options that it leaves out."""
    recompute: Literal["none", "block", "selective"] = "none"
    """Activation recomputation (checkpointing). block: recompute each layer in backward from its input. selective: only
    the core of attention."""
    compile: bool = False
    """Compile every layer with torch.compile."""
    device: str = "auto"
    """cpu; cuda: one GPU per rank; cuda:0: this GPU for all ranks; auto: cuda if there is a GPU per rank, else cpu."""
    folder: Path | None = None
    """Run folder, for metrics.jsonl, config.toml, loss.png and checkpoints; the next free one of runs/0001, runs/0002,
    ... when not given."""
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={"option": False})
    """Not an option, but the names of the options that the user gave, such as "data.source". The value of one may equal
    its default, and yet the user expects it to have an effect."""

    def num_replicas(self, mesh: Mesh) -> int:
        """Number of replicas that train separately between merges; 1 if all ranks train together."""
        return (self.consistency.replicas or mesh.dp) if self.consistency.merges_replicas else 1

    def replica_mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh of one replica, whose ranks train together. mesh: of all ranks."""
        return dataclasses.replace(
            mesh, dp=1 if self.consistency.is_asynchronous else mesh.dp // self.num_replicas(mesh)
        )

    def mesh_of(self, world_size: int) -> Mesh:
        """Return the mesh of a run on `world_size` ranks, with `mesh.dp` filled in if it is not given.

        Raises UserError if the axes do not multiply to that number.
        """
        m = self.mesh
        for axis, size in dataclasses.asdict(m).items():
            if size is not None and size < 1:
                raise UserError(f"mesh.{axis} is {size}; a mesh axis is at least 1. Give --mesh.{axis} 1 or more.")
        model = m.pp * m.cp * m.tp  # ranks of one model replica
        dp = max(1, world_size // model) if m.dp is None else m.dp
        if dp * model != world_size:
            hints = [f'start with torchrun or "--ranks {dp * model}"']
            if option := self._mesh_option_for(world_size, model):
                hints.insert(0, f"set {option}")
            raise UserError(
                f"the mesh pp={m.pp} x dp={dp} x cp={m.cp} x tp={m.tp} needs {dp * model} ranks, "
                f"the world has {world_size}: {', or '.join(hints)}."
            )
        return Mesh(pp=m.pp, dp=dp, cp=m.cp, tp=m.tp)

    def _mesh_option_for(self, world_size: int, model: int) -> str | None:
        """Return an option that makes the mesh fill `world_size` ranks; None if there is none, or one rank only.

        model: number of ranks of one model replica.
        """
        if world_size == 1:
            return None
        if self.mesh.dp is not None and world_size % model == 0:
            return f"--mesh.dp {world_size // model}, or leave it out"
        for axis in ("cp", "pp", "tp"):
            size = getattr(self.mesh, axis)
            others = (self.mesh.dp or 1) * model // size
            fits = [smaller for smaller in range(1, size) if world_size % (others * smaller) == 0]
            if fits and (self.mesh.dp is None or others * fits[-1] == world_size):
                return f"--mesh.{axis} {fits[-1]}"
        return None


def option_fields(config: Any) -> list[dataclasses.Field]:
    """Return the fields of a configuration, or of a section of one, that are options or sections."""
    return [item for item in dataclasses.fields(config) if item.metadata.get("option", True)]


def to_toml(config: Any, prefix: str = "") -> str:
    """Return a configuration, or a section of one, as TOML text with all options.

    prefix: stands before the names of all sections; empty for a whole configuration.
    """
    lines = []
    sections = []
    for item in option_fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            sections.append(f"\n[{prefix}{item.name}]\n" + to_toml(value, f"{prefix}{item.name}."))
        else:
            lines.append(f"{item.name} = {_toml_value(value)}\n")
    return "".join(lines + sections)


def _toml_value(value: Any) -> str:
    """Return one value in TOML syntax; None as "none"."""
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case tuple() | list():
            return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's
