"""Options without effect: an error if the run would lack what the option requests, else a warning. Needs no torch."""

import math
from collections.abc import Callable
from typing import Any

from minidist.config import Config
from minidist.errors import UserError, format_count
from minidist.learning_rate import learning_rate
from minidist.mesh import Mesh
from minidist.precision.policy import resolve_policy
from minidist.tools.chaos.faults import Fault, parse_fault
from minidist.validation import option_value, validate

# Options that need not have an effect: their names, when they have one, and why they otherwise have none. A reason may
# contain options, as {optim.kind}.
OptionRule = tuple[str, Callable[[Config, Mesh], bool], str]
# Refused if given without effect, because the run would lack what they ask for.
_REFUSED: tuple[OptionRule, ...] = (
    ("zero.offload", lambda c, m: c.device != "cpu",
     "it moves master weights and optimizer states from a GPU to the host, and device is cpu"),
    ("data.source", lambda c, m: c.data.path is None, "data.path is {data.path}, and a run reads one or the other"),
    ("trace.first trace.steps", lambda c, m: c.trace.file is not None, "no trace is written: give --trace FILE"),
    ("fault.digest_every", lambda c, m: not c.consistency.is_asynchronous,
     "in consistency.mode {consistency.mode} each rank has the parameters of its own last pull, which differ from "
     "those of the others, and only the server has optimizer states, so no two ranks hold tensors that must be equal"),
    ("fault.digest_every", lambda c, m: c.consistency.mode != "gossip" or c.replica_mesh(m).world_size > 1,
     "in consistency.mode gossip the replicas differ until the last step, and each of them has one rank here, so no "
     "two ranks hold tensors that must be equal"),
    ("fault.repair", lambda c, m: c.fault.digest_every > 0, "no replicas are compared: give --fault.digest-every"),
    ("fault.max_restarts fault.memory_every", lambda c, m: c.fault.live_recovery,
     "ranks are not replaced: give --fault.live-recovery"),
    ("consistency.h consistency.replicas consistency.fragments consistency.reset_moments",
     lambda c, m: c.consistency.merges_replicas,
     "consistency.mode is {consistency.mode}; it is for local, diloco and gossip, whose replicas train by themselves"),
    ("consistency.outer_lr consistency.outer_momentum consistency.exchange",
     lambda c, m: c.consistency.mode == "diloco",
     "consistency.mode is {consistency.mode}; it is for diloco"),
    ("consistency.topology", lambda c, m: c.consistency.mode == "gossip",
     "consistency.mode is {consistency.mode}; it is for gossip"),
    ("consistency.server", lambda c, m: c.consistency.mode == "central" or c.consistency.is_asynchronous,
     "consistency.mode is {consistency.mode}; it is for central, asynchronous and stale"),
    ("consistency.staleness_bound", lambda c, m: c.consistency.mode == "stale",
     "consistency.mode is {consistency.mode}; it is for stale"),
    ("memory.step", lambda c, m: c.memory.file is not None, "no memory is measured: give --memory FILE"),
)  # fmt: skip
# Options that may be given without effect.
_OPTION_RULES: tuple[OptionRule, ...] = (
    ("parallel.schedule parallel.chunks", lambda c, m: m.pp > 1, "mesh.pp is 1, which is no pipeline"),
    ("parallel.sequence", lambda c, m: m.tp > 1, "mesh.tp is 1, and sequence parallelism works across tp ranks"),
    ("parallel.context", lambda c, m: m.cp > 1, "mesh.cp is 1, so every rank has complete sequences"),
    ("zero.keep_last_block zero.prefetch", lambda c, m: c.zero.stage == 3, "zero.stage is {zero.stage}, not 3"),
    ("zero.keep_last_block comm.bucket_mib", lambda c, m: c.engine == "fast" or not c.zero.stage,
     "engine is {engine}, whose ZeRO has no buckets and keeps no block"),
    ("checkpoint.background", lambda c, m: c.engine != "simple", "engine is simple, which saves in the foreground"),
    ("precision.initial_scale precision.growth_interval precision.max_overflows",
     lambda c, m: resolve_policy(c.precision).scaled, "the loss is not scaled (loss-scale {precision.loss_scale})"),
    ("optim.betas optim.eps", lambda c, m: c.optim.kind != "sgd", "optim.kind is sgd; it is for adamw and muon"),
    ("optim.momentum", lambda c, m: c.optim.kind == "sgd", "optim.kind is {optim.kind}; it is for sgd"),
    ("optim.muon_momentum optim.muon_lr_ratio optim.muon_steps",
     lambda c, m: c.optim.kind == "muon", "optim.kind is {optim.kind}; it is for muon"),
    ("optim.decay", lambda c, m: c.optim.weight_decay > 0, "optim.weight-decay is 0"),
    ("optim.min_lr_fraction", lambda c, m: c.optim.schedule != "constant", "optim.schedule is constant"),
    ("optim.decay_fraction", lambda c, m: c.optim.schedule == "wsd", "optim.schedule is {optim.schedule}, not wsd"),
    ("comm.bucket_mib", lambda c, m: c.comm.gradients == "bucketed",
     "comm.gradients is {comm.gradients}, without buckets"),
    ("comm.algorithm comm.gradients", lambda c, m: m.dp * m.cp > 1, "dp x cp is 1, so no gradients are reduced"),
)  # fmt: skip


def validate_options(config: Config, world_size: int) -> Mesh:
    """Check that the trainer can run `config` on `world_size` ranks, and return the mesh of the run.

    Raises UserError if it cannot run, and for an option that requests something the run would not do. `minidist train`
    calls this before ranks start.
    """
    mesh = validate(config, world_size)
    _check_steps(config)
    if config.fault.inject is not None:
        _check_fault(config, parse_fault(config.fault.inject, world_size))
    for message in _find_unused_options(config, mesh, _REFUSED):
        raise UserError(f"{message} Leave --{message.split()[0]} out.")
    return mesh


def find_warnings(config: Config, mesh: Mesh) -> list[str]:
    """Return warnings, as text, about settings of a run that have no effect, or hardly any."""
    found = _find_unused_options(config, mesh, _OPTION_RULES)
    warmup, steps = config.optim.warmup_steps, config.train.steps
    if warmup > steps and _is_requested("optim.warmup-steps", config):
        found.append(
            f"optim.warmup-steps is {warmup} and the run has {format_count(steps, 'step')}: the learning rate ends at "
            f"{config.optim.lr * steps / warmup:.3g} and never reaches optim.lr {config.optim.lr:g}."
        )
    if config.fault.digest_every and config.consistency.mode == "gossip":
        found.append(
            f"fault.digest-every {config.fault.digest_every} compares the ranks inside each of the "
            f"{config.num_replicas(mesh)} replicas: under gossip the replicas themselves differ until the last step."
        )
    how = config.consistency
    if how.merges_replicas and config.num_replicas(mesh) == 1:
        effect = (
            "its outer step is along this replica's own difference" if how.mode == "diloco" else "it merges nothing"
        )
        found.append(
            f"consistency.mode {how.mode} has one replica here, {mesh}: {effect}. For more replicas, give mesh.dp a "
            "larger size and the other axes smaller ones, or start more ranks."
            if mesh.dp == 1
            else f"consistency.mode {how.mode} has one replica here (consistency.replicas 1): {effect}. Leave "
            f"--consistency.replicas out for {mesh.dp} replicas."
        )
    return found + find_zero_warnings(config, mesh)


def find_zero_warnings(config: Config, mesh: Mesh) -> list[str]:
    """Return warnings, as text, if the run's ZeRO stage costs communication and saves little memory on this mesh."""
    zero, found, ranks = config.zero, [], config.zero.shard_group_size(config.replica_mesh(mesh))
    if zero.stage and ranks == 1:
        replicas = config.num_replicas(mesh)
        where = f"each of the {replicas} replicas of consistency.mode {config.consistency.mode} has " * (replicas > 1)
        found.append(
            f"zero.stage {zero.stage} shards nothing here: {where}dp x cp = 1, so each part of the model is on one "
            f"rank only{' of a replica' * (replicas > 1)}. It costs nothing and saves nothing."
        )
    micro_batches = config.train.micro_batches
    if zero.stage == 2 and mesh.pp > 1 and not zero.keep_gradients and ranks > 1:
        found.append(
            f"zero.stage 2 under a pipeline reduces gradients in each of {micro_batches} micro-batches; stage 1 "
            "reduces them once per step and keeps them unsharded."
        )
    if zero.stage == 2 and zero.keep_gradients:
        found.append("zero.stage 2 with zero.keep-gradients needs the memory and the communication of stage 1.")
    if zero.stage == 3 and mesh.pp > 1 and ranks > 1:
        found.append(
            f"zero.stage 3 under a pipeline gathers every layer twice in each of {micro_batches} micro-batches; "
            "stages 1 and 2 communicate far less, and the pipeline has already divided the parameters."
        )
    return found


def describe_learning_rate_jump(before: Config, config: Config, step: int) -> str | None:
    """Return a warning if the learning rate jumps where a run resumes after `step` steps, else None.

    before: the configuration of the run that wrote the checkpoint. config: the configuration of the resumed run.
    """
    was, now = (learning_rate(run.optim, step, run.train.steps) for run in (before, config))
    if math.isclose(was, now, rel_tol=0.01):
        return None
    schedules = [f"{run.optim.schedule} over {run.train.steps} steps" for run in (before, config)]
    return (
        f"learning rate of step {step + 1}: {now:.2e} by the schedule of this run ({schedules[1]}); by that of the "
        f"checkpoint ({schedules[0]}) it would be {was:.2e}. To extend runs without such a jump, train them with "
        "--optim.schedule constant or wsd."
    )


def _check_fault(config: Config, fault: Fault) -> None:
    """Raise UserError for a fault in the reduced gradient on a rank that has none: with a central server, a worker."""
    server = config.consistency.server
    if config.consistency.mode == "central" and (fault.kind, fault.phase) == ("nan", "agree") and fault.rank != server:
        raise UserError(
            f"fault.inject names rank {fault.rank} for a NaN in the reduced gradient (agree), and in consistency.mode "
            f"central only the server, rank {server}, has it: name rank {server}, or the phase backward."
        )


def _check_steps(config: Config) -> None:
    """Raise UserError if a trace or a memory measurement would begin after the last step."""
    steps = config.train.steps
    for name, verb in (("trace.first", "recorded"), ("memory.step", "measured")):
        if (option_value(config, name) or 0) > steps:
            raise UserError(
                f"{name} is {option_value(config, name)}, but the run ends at step {steps}: no step would be {verb}. "
                f"Give --{name} {steps} or less."
            )


def _find_unused_options(config: Config, mesh: Mesh, rules: tuple[OptionRule, ...]) -> list[str]:
    """Return a message for each option that was requested and has no effect in this run.

    rules: which options have an effect, and when; see `OptionRule`.
    """
    found, sections = [], vars(config)
    for options, has_effect, reason in rules:
        for option in () if has_effect(config, mesh) else options.split():
            value, name = option_value(config, option), option.replace("_", "-")
            if _is_requested(name, config):
                found.append(f"{name} {_format_value(value)} has no effect: {reason.format(**sections)}.")
    return found


def _is_requested(name: str, config: Config) -> bool:
    """Return whether an option requests something: it differs from its default, or the user gave its default.

    A switch that is off and a value of None request nothing.
    """
    value = option_value(config, name)
    if value != option_value(Config(), name):
        return True
    return name in config.given and value is not None and value is not False


def _format_value(value: Any) -> str:
    """Return an option's value as it is written in a configuration file."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
