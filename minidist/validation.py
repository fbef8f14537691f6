"""Validation: refuse every run that cannot work, before a rank starts.

`validate` checks a whole configuration for a number of ranks and returns its mesh; the functions below it check one
concern each. Every message says what was given, what is possible and one change to make, with the numbers involved.
Nothing here needs torch.
"""

import math
import re
import typing
from collections.abc import Callable
from typing import Any

from minidist.config import Config, ScheduleKind
from minidist.errors import UserError, format_count, suggest
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.parallel.context.chunks import LAYOUTS, num_chunks, resolve_layout
from minidist.precision.policy import resolve_policy

SCHEDULES: tuple[str, ...] = typing.get_args(ScheduleKind)
# Schedules that compute the gradients of a stage's input and of its weights separately.
SPLIT_BACKWARD = ("zb-h1", "zb-h2", "zb-v")

# The options that are numbers, by their smallest and largest value.
_RANGES: dict[tuple[float, float], str] = {
    (0, math.inf): "train.max-skipped-steps train.straggler-threshold train.eval-every train.sample-tokens "
    "checkpoint.every checkpoint.keep-every fault.digest-every fault.max-restarts fault.memory-every "
    "optim.lr optim.weight-decay optim.warmup-steps consistency.staleness-bound",
    (1, math.inf): "train.steps train.global-batch train.micro-batches train.log-every train.eval-samples "
    "checkpoint.keep precision.growth-interval precision.max-overflows zero.shard trace.first trace.steps memory.step "
    "data.seq-len consistency.h consistency.replicas consistency.fragments",
    (0, 1): "optim.min-lr-fraction optim.decay-fraction",
    (0, 2**63 - 1): "train.seed",
    (1, 20): "optim.muon-steps",
    (1e-30, 1e30): "precision.initial-scale",  # float32 can represent the scales around these bounds too
}
# Decay rates: with 1 a moving average would never forget its first value, and a momentum never decay.
_BELOW_ONE = "optim.betas optim.momentum optim.muon-momentum consistency.outer-momentum"
_POSITIVE = (
    "optim.eps optim.clip-norm optim.muon-lr-ratio comm.bucket-mib comm.timeout-s comm.hang-limit-s "
    "consistency.outer-lr"
)


def validate(config: Config, world_size: int) -> Mesh:
    """Raise UserError if `config` cannot run on `world_size` ranks; return the mesh of the run."""
    mesh = config.mesh_of(world_size)
    how = config.parallel
    try:
        config.model.validate()
        validate_numbers(config)
        _validate_data(config, mesh)
        validate_pipeline(config, mesh)
        _validate_compile(config, mesh)
        _validate_consistency(config, mesh)
        _validate_zero(config, mesh)
        _validate_engine(config)
        validate_tensor_parallel(config.model, mesh.tp)
        validate_context_parallel(
            config.model, config.data.seq_len, mesh.cp, how.context, tp=mesh.tp, sequence_parallel=how.sequence
        )
    except ValueError as error:  # its message begins with the name of an option
        section = "data" if str(error).startswith("seq_len") else "model"
        raise UserError(f"{section}.{error}.") from None
    return mesh


# -- numbers and data ------------------------------------------------------------------------------------------------


def validate_numbers(config: Config) -> None:
    """Raise UserError for an option whose number is outside its range, and for an unknown device."""
    for (least, most), names in _RANGES.items():
        for name in names.split():
            value = option_value(config, name)
            if value is not None and not (least <= value <= most and abs(value) < math.inf):
                needed = f"from {least} to {most}" if most < math.inf else f"{least} or more"
                raise UserError(f"{name} is {value}; it must be {needed}: change --{name}.")
    for name in _POSITIVE.split():
        value = option_value(config, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} is {value}; it must be above 0: change --{name}.")
    for name in _BELOW_ONE.split():
        value = option_value(config, name)
        values = value if isinstance(value, tuple) else (value,)
        if not all(0 <= number < 1 for number in values):
            needed = f"{'both ' if len(values) > 1 else 'it '}must be 0 or more and below 1"
            raise UserError(f"{name} is {value}; {needed}: change --{name}.")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise UserError(
            f"device is {config.device!r}; possible: auto, cpu, cuda (one GPU per rank), cuda:0 (one for all)."
        )


def _validate_data(config: Config, mesh: Mesh) -> None:
    """Raise UserError if sequences are too long for the model, or the global batch cannot be divided over the ranks."""
    train = config.train
    data = config.data
    if data.seq_len > config.model.max_seq_len:
        raise UserError(
            f"data.seq-len is {data.seq_len}, but the model accepts at most {config.model.max_seq_len} tokens: "
            f"give --data.seq-len {config.model.max_seq_len} or less, or --model.max-seq-len {data.seq_len}."
        )
    if data.min_length is not None and not 1 <= data.min_length <= data.seq_len:
        raise UserError(f"data.min-length is {data.min_length}; it must be from 1 to data.seq-len ({data.seq_len}).")
    needed = mesh.dp * train.micro_batches
    if train.global_batch < needed:
        fewer = train.global_batch // mesh.dp
        raise UserError(
            f"a global batch of {train.global_batch} samples is too small for dp={mesh.dp} ranks x "
            f"{train.micro_batches} micro-batches = {needed} (world size {mesh.world_size}, {mesh}): "
            f"give --train.global-batch {needed} or more"
            + (
                f", or --train.micro-batches {fewer} or fewer."
                if fewer
                else f", or --mesh.dp {train.global_batch} or fewer."
            )
        )
    for name, values in (("shares", data.shares), ("weights", data.weights)):
        if values is not None and (
            len(values) != mesh.dp or not all(0 <= v < math.inf for v in values) or not any(values)
        ):
            raise UserError(
                f"data.{name} is {' '.join(map(str, values))} ({format_count(len(values), 'number')}); it needs one "
                f"number per data-parallel rank ({mesh.dp}), none of them below 0 and at least one above 0."
            )


# -- pipeline, tensor and context parallelism -------------------------------------------------------------------------


def validate_pipeline(config: Config, mesh: Mesh) -> None:
    """Raise UserError if the model has too few layers for the pipeline, or the step too few micro-batches."""
    if mesh.pp == 1:
        return
    chunks = validate_schedule(config.parallel.schedule, mesh.pp, config.train.micro_batches, config.parallel.chunks)
    layers = config.model.num_layers
    needed = mesh.pp * chunks
    if layers < needed:
        each = f" x {chunks} chunks = {needed} model chunks" if chunks > 1 else ""
        raise UserError(
            f"mesh.pp is {mesh.pp}: {mesh.pp} stages{each} need at least one layer each, but the model has {layers}: "
            f"give --mesh.pp {max(1, layers // chunks)}, or --model.num-layers {needed}."
        )


def validate_schedule(kind: str, num_stages: int, num_micro_batches: int, chunks_per_stage: int | None = None) -> int:
    """Raise UserError if a pipeline schedule is impossible; return its number of model chunks per stage.

    kind: name of the schedule. num_micro_batches: number per step. chunks_per_stage: None for the schedule's default.
    """
    if kind not in SCHEDULES:
        raise UserError(f"there is no schedule {kind!r}; {suggest(kind, SCHEDULES)}")
    for name, number in (("stages", num_stages), ("micro-batches", num_micro_batches)):
        if number < 1:
            raise UserError(f"{kind} with {number} {name}: a pipeline needs at least 1. Give 1 or more {name}.")
    fixed = {"interleaved": None, "zb-v": 2}.get(kind, 1)
    if chunks_per_stage is None:
        chunks_per_stage = fixed or 2
    if (
        (fixed and chunks_per_stage != fixed)
        or chunks_per_stage < 1
        or (kind == "interleaved" and chunks_per_stage < 2)
    ):
        takes = f"{fixed} chunk{'s' * (fixed > 1)}" if fixed else "2 or more chunks"
        other = "" if kind == "interleaved" else ", or choose interleaved"
        raise UserError(f"{kind} needs {takes} per stage, but chunks is {chunks_per_stage}: leave it out{other}.")
    if kind == "interleaved" and num_micro_batches % num_stages:
        low = num_micro_batches // num_stages * num_stages
        near = f"{low} or {low + num_stages}" if low else f"{num_stages}"
        raise UserError(
            f"interleaved needs a number of micro-batches that is a multiple of the number of stages, and "
            f"{num_micro_batches} is not a multiple of {num_stages}. Give {near} micro-batches, or choose 1f1b."
        )
    if kind == "zb-h2" and num_micro_batches < 2 * num_stages - 1:
        fits = (num_micro_batches + 1) // 2
        raise UserError(
            f"zb-h2 needs 2 x {num_stages} stages - 1 = {2 * num_stages - 1} micro-batches in flight, but there are "
            f"only {num_micro_batches}: give {2 * num_stages - 1} micro-batches or more, "
            f"{fits} stage{'s' * (fits > 1)} or fewer, or choose zb-h1."
        )
    return chunks_per_stage


def _validate_compile(config: Config, mesh: Mesh) -> None:
    """Raise UserError for options that need to see inside a layer, which is not possible if layers are compiled."""
    if not config.compile:
        return
    if mesh.pp > 1 and config.parallel.schedule in SPLIT_BACKWARD:
        raise UserError(
            f"compile is on and parallel.schedule is {config.parallel.schedule}, which splits the backward pass into "
            "input and weight gradients; a compiled layer computes both at once: give --no-compile, or "
            "--parallel.schedule 1f1b or interleaved."
        )
    if config.recompute == "selective":
        raise UserError(
            "compile is on and recompute is selective: inside a compiled layer the compiler decides which activations "
            "to recompute: give --recompute none or block, or --no-compile."
        )


def validate_tensor_parallel(model: ModelConfig, tp: int) -> None:
    """Raise ValueError if the heads, feed-forward features or vocabulary of `model` cannot be split over `tp` ranks.

    The message lists the values of tp by which all of them can be split.
    """
    heads = model.num_heads
    kv_heads = model.num_kv_heads
    divided = ("num_heads", "intermediate_size", "vocab_size")

    def is_possible(n: int) -> bool:
        return not any(getattr(model, name) % n for name in divided) and not (kv_heads % n and n % kv_heads)

    possible = _possible_sizes(is_possible, heads)
    for name in divided:
        size = getattr(model, name)
        if size % tp:
            larger = "" if name == "num_heads" else f"; or {name}={-(-size // tp) * tp}"
            raise ValueError(f"{name}={size} is not divisible by tp={tp}; possible tp: {possible}{larger}")
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"num_kv_heads={kv_heads} and tp={tp}: one must divide the other, or a head would be split; "
            f"possible tp: {possible}"
        )


def validate_context_parallel(
    model: ModelConfig,
    seq_len: int,
    cp: int,
    attention: str,
    layout: str | None = None,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> None:
    """Raise ValueError, with the sizes that work, if sequences of `seq_len` tokens cannot be sharded over `cp` ranks.

    model: the configuration of the unsharded model. attention: "ring" or "ulysses". layout: one of `LAYOUTS`; None for
    the default of `attention`. tp: the size of tensor parallelism, which shards the heads. sequence_parallel: whether
    sequence parallelism shards each rank's tokens over the tp ranks as well.
    """
    layout = resolve_layout(attention, layout)
    validate_sequence_length(layout, seq_len, cp)
    heads = model.num_heads // tp
    if attention == "ulysses" and heads % cp:
        raise ValueError(
            f"num_heads={model.num_heads} over tp={tp} leaves {heads} query heads per rank, not divisible by cp={cp} "
            f"as ulysses needs; possible cp: {_possible_sizes(lambda n: heads % n == 0, heads)}; or ring, for any heads"
        )
    if sequence_parallel and seq_len // cp % tp:
        raise ValueError(
            f"seq_len={seq_len} over cp={cp} leaves {seq_len // cp} tokens per rank, not divisible by tp={tp} as "
            f"sequence parallelism needs; seq_len={_next_multiple(seq_len, num_chunks(layout, cp), cp * tp)} works"
        )


def validate_sequence_length(layout: str, seq_len: int, cp: int) -> None:
    """Raise ValueError, with the sizes that work, if `seq_len` tokens cannot be divided evenly over `cp` ranks.

    layout: which chunks of a sequence a rank has, one of `LAYOUTS`.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"there is no layout {layout!r}; possible: {', '.join(LAYOUTS)}")
    count = num_chunks(layout, cp)
    if seq_len % count:
        per_rank = "two chunks per rank" if layout == "zigzag" else "one chunk per rank"
        possible = _possible_sizes(lambda n: seq_len % num_chunks(layout, n) == 0, min(seq_len, 4 * cp))
        raise ValueError(
            f"seq_len={seq_len} is not divisible into {count} equal chunks, as cp={cp} needs in the {layout} layout "
            f"({per_rank}); possible cp: {possible}; or seq_len={_next_multiple(seq_len, count)}"
        )


# -- replicas that differ ---------------------------------------------------------------------------------------------


def _validate_consistency(config: Config, mesh: Mesh) -> None:
    """Raise UserError if the mode of consistency does not work with the mesh or with the other options."""
    how = config.consistency
    steps = config.train.steps
    if how.is_asynchronous and config.fault.live_recovery:
        raise UserError(
            f"fault.live-recovery repeats the step that a death has interrupted, and in consistency.mode {how.mode} "
            "ranks have no step in common: leave --fault.live-recovery out; a run resumes from its last checkpoint."
        )
    if how.mode == "central" or how.is_asynchronous:
        _validate_server(config, mesh)
    if how.merges_replicas and mesh.dp % config.num_replicas(mesh):
        possible = _possible_sizes(lambda n: mesh.dp % n == 0, mesh.dp)
        raise UserError(
            f"consistency.replicas is {how.replicas}, and dp={mesh.dp} ranks cannot be divided into as many equal "
            f"replicas: give --consistency.replicas {possible}."
        )
    if how.merges_replicas and steps % how.h:
        down, up = steps // how.h * how.h, -(-steps // how.h) * how.h
        raise UserError(
            f"consistency.h is {how.h}, which does not divide the {steps} steps: the run would end between two merges. "
            f"Give --train.steps {f'{down} or {up}' if down else up}, or --consistency.h {math.gcd(steps, how.h)}."
        )
    most = min(how.h, config.model.num_layers)
    if how.merges_replicas and how.fragments > most:
        raise UserError(
            f"consistency.fragments is {how.fragments}: each has a layer and a step of its own to be merged, and the "
            f"model has {format_count(config.model.num_layers, 'layer')}, merged every {format_count(how.h, 'step')}. "
            f"Give --consistency.fragments {most}."
        )
    tied = mesh.pp > 1 and config.model.tie_embeddings
    if tied and config.num_replicas(mesh) > 2:  # their ranks would sum the replicas in other orders
        raise UserError(
            f"consistency.mode {how.mode} merges {config.num_replicas(mesh)} replicas, and with more than 2 the tied "
            f"embeddings of the first and last of mesh.pp={mesh.pp} stages would drift apart: give "
            "--model.no-tie-embeddings, or --consistency.replicas 2."
        )


def _validate_server(config: Config, mesh: Mesh) -> None:
    """Raise UserError if the mesh or other options do not work with one server for all parameters."""
    mode = config.consistency.mode
    server = config.consistency.server
    zero = config.zero.stage
    if not 0 <= server < mesh.world_size:
        raise UserError(
            f"consistency.server is {server}, and the {mesh.world_size} ranks of {mesh} are 0 to "
            f"{mesh.world_size - 1}: give --consistency.server 0."
        )
    if mesh.dp != mesh.world_size or zero or not resolve_policy(config.precision).uniform:
        raise UserError(
            f"consistency.mode {mode} has the whole model on one server, in one dtype: {mesh}, zero.stage {zero} and "
            f"precision.policy {config.precision.policy} do not fit. Give --mesh.dp {mesh.world_size} alone and "
            f"--precision.policy fp32; --zero.stage 1 in place of {mode} makes every rank the server of a shard."
        )
    if config.comm.algorithm != "backend" or config.comm.gradients != "bucketed":
        raise UserError(
            f"consistency.mode {mode} sends gradients to one rank, without an all-reduce or its order: leave "
            "--comm.algorithm and --comm.gradients out."
        )


# -- ZeRO and the optimizer -------------------------------------------------------------------------------------------


def _validate_zero(config: Config, mesh: Mesh) -> None:
    """Raise UserError if the ZeRO stage does not work with the other options or with the mesh."""
    zero = config.zero
    policy = resolve_policy(config.precision)
    validate_shard_group(config, mesh)
    if zero.keep_gradients and zero.stage != 2:
        raise UserError(
            f"zero.keep-gradients is for stage 2, and zero.stage is {zero.stage}: stages 0 and 1 always keep unsharded "
            "gradients, stage 3 never does. Leave --zero.keep-gradients out."
        )
    if config.comm.algorithm != "backend" and zero.stage:
        raise UserError(
            f"comm.algorithm is {config.comm.algorithm}, an all-reduce, and zero.stage {zero.stage} reduces gradients "
            "by reduce-scatter. Leave --comm.algorithm out, or give --zero.stage 0."
        )
    if config.comm.gradients != "bucketed" and (zero.stage or not policy.uniform):
        raise UserError(
            f"comm.gradients is {config.comm.gradients}, which needs zero.stage 0 (given: {zero.stage}) and one dtype "
            f"for all tensors (given: precision.policy {config.precision.policy}). Leave --comm.gradients out."
        )


def validate_shard_group(config: Config, mesh: Mesh) -> None:
    """Raise UserError if the data-parallel ranks cannot be divided into shard groups of `zero.shard` ranks."""
    mesh = config.replica_mesh(mesh)
    shard = config.zero.shard
    ranks = f"dp={mesh.dp} x cp={mesh.cp} = {mesh.dp * mesh.cp} ranks"
    if shard is None:
        return
    if config.zero.stage == 0:
        raise UserError(
            f"zero.shard is {shard}, but zero.stage 0 shards nothing: give --zero.stage 1, 2 or 3, or leave "
            "--zero.shard out."
        )
    possible = [mesh.cp * n for n in range(1, mesh.dp + 1) if mesh.dp % n == 0]
    if shard not in possible:
        raise UserError(
            f"zero.shard is {shard}: {ranks} cannot be divided into groups of {shard} that hold complete sequences. "
            f"Possible: --zero.shard {' or '.join(map(str, possible))}."
        )


# -- engines ----------------------------------------------------------------------------------------------------------


# Whether an engine can run it, what was given, and the change to make.
_Restrictions = tuple[tuple[bool, str, str], ...]


def _validate_engine(config: Config) -> None:
    """Raise UserError if the engine cannot run these options."""
    # Each round of these algorithms waits for the one before, so nothing would overlap with backward.
    if config.comm.algorithm != "backend" and (config.engine, config.comm.gradients) != ("simple", "naive"):
        raise UserError(
            f"comm.algorithm is {config.comm.algorithm}, an all-reduce of minidist/simple/collectives.py, and engine "
            f"is {config.engine} with comm.gradients {config.comm.gradients}: give --engine simple --comm.gradients "
            "naive, or leave --comm.algorithm out."
        )
    if config.engine == "simple":
        for is_possible, given, change in _simple_restrictions(config):
            if not is_possible:
                raise UserError(f"engine is simple, which cannot run {given}: give {change}, or --engine fast.")


def _simple_restrictions(config: Config) -> _Restrictions:
    """Return, for each option that engine simple supports in part: (is it possible, what was given, the change)."""
    precision = config.precision
    zero = config.zero
    mode = config.consistency
    optim = config.optim
    schedule = config.parallel.schedule
    fault = config.fault
    on_virtual_clock = ""
    if mode.mode in ("central", "asynchronous", "stale"):
        on_virtual_clock = " (its servers run on the virtual clock of tools/consistency/virtual_run.py)"
    set_dtypes = [
        f"--precision.{name.replace('_', '-')}"
        for name in ("compute", "parameter", "grad_accum", "reduce", "master")
        if getattr(precision, name) is not None
    ]
    return (
        (schedule in ("gpipe", "1f1b", "zb-h1"), f"parallel.schedule {schedule}", "--parallel.schedule 1f1b or gpipe"),
        (optim.kind != "muon", "optim.kind muon", "--optim.kind adamw or sgd"),
        (not config.compile, "compile true", "--no-compile"),
        (config.recompute != "selective", "recompute selective", "--recompute block"),
        # Recomputation gives both halves of a backward at once.
        (
            config.recompute == "none" or schedule != "zb-h1",
            f"recompute {config.recompute} with parallel.schedule zb-h1",
            "--parallel.schedule 1f1b",
        ),
        (not set_dtypes, f"dtypes of their own ({' '.join(set_dtypes)})", "--precision.policy alone"),
        (
            precision.loss_scale != "dynamic" or precision.policy == "fp16",
            f"precision.loss-scale dynamic with precision.policy {precision.policy}",
            "no --precision.loss-scale",
        ),
        (zero.shard is None, f"zero.shard {zero.shard}", "no --zero.shard"),
        (not zero.keep_gradients, "zero.keep-gradients true", "--zero.no-keep-gradients"),
        (not zero.offload, "zero.offload true", "--zero.no-offload"),
        (
            mode.mode in ("synchronous", "local", "diloco"),
            f"consistency.mode {mode.mode}{on_virtual_clock}",
            "--consistency.mode synchronous, local or diloco",
        ),
        (mode.exchange == "full", f"consistency.exchange {mode.exchange}", "--consistency.exchange full"),
        (mode.fragments == 1, f"consistency.fragments {mode.fragments}", "--consistency.fragments 1"),
        (not mode.reset_moments, "consistency.reset-moments true", "--consistency.no-reset-moments"),
        (not fault.live_recovery, "fault.live-recovery true", "--fault.no-live-recovery"),
        (
            fault.inject is None or (fault.inject.startswith("flip ") and fault.inject.endswith(" in gather")),
            f"fault.inject {fault.inject!r}",
            'no --fault.inject, or one like "flip rank 1 at step 3 in gather"',
        ),
        (
            not fault.digest_every or mode.mode == "synchronous",
            f"fault.digest-every {fault.digest_every} with consistency.mode {mode.mode}",
            "--fault.digest-every 0",
        ),
        (
            config.train.max_skipped_steps == 0,
            f"train.max-skipped-steps {config.train.max_skipped_steps}",
            "--train.max-skipped-steps 0",
        ),
        (
            config.checkpoint.keep_every == 0,
            f"checkpoint.keep-every {config.checkpoint.keep_every}",
            "--checkpoint.keep-every 0",
        ),
        (config.memory.file is None, f"memory.file {config.memory.file}", "no --memory"),
        (config.trace.file is None, f"trace.file {config.trace.file}", "no --trace"),
    )


# -- text -------------------------------------------------------------------------------------------------------------


def option_value(config: Config, name: str) -> Any:
    """Return the value of the option `name`, such as "train.global-batch"."""
    section, field_name = name.replace("-", "_").split(".")
    return getattr(getattr(config, section), field_name)


def _next_multiple(number: int, *factors: int) -> int:
    """The smallest multiple of all the factors that is at least `number`."""
    step = math.lcm(*factors)
    return -(-number // step) * step


def _possible_sizes(fits: Callable[[int], bool], most: int) -> str:
    """The sizes from 1 to `most` that fit, as text."""
    return ", ".join(str(n) for n in range(1, most + 1) if fits(n))
