"""Warnings about settings that are valid but pointless: one sentence or two for each. Needs no torch."""

import math

from minidist.config import Config
from minidist.mesh import Mesh
from minidist.precision.policy import resolve_policy
from minidist.train.schedule import learning_rate
from minidist.validation import OptionRule, find_unused_options

# Options that may be given without effect; the format is that of `find_unused_options`.
_OPTION_RULES: tuple[OptionRule, ...] = (
    ("parallel.schedule parallel.chunks", lambda c, m: m.pp > 1, "mesh.pp is 1, which is no pipeline"),
    ("parallel.sequence", lambda c, m: m.tp > 1, "mesh.tp is 1, and sequence parallelism works across tp ranks"),
    ("parallel.context", lambda c, m: m.cp > 1, "mesh.cp is 1, so every rank has complete sequences"),
    ("zero.keep_last_block zero.prefetch", lambda c, m: c.zero.stage == 3, "zero.stage is {zero.stage}, not 3"),
    ("precision.initial_scale precision.growth_interval precision.max_overflows",
     lambda c, m: resolve_policy(c.precision).scaled, "the loss is not scaled (loss-scale {precision.loss_scale})"),
    ("optim.betas optim.eps", lambda c, m: c.optim.kind != "sgd", "optim.kind is sgd; it is for adamw and muon"),
    ("optim.momentum", lambda c, m: c.optim.kind == "sgd", "optim.kind is {optim.kind}; it is for sgd"),
    ("optim.muon_momentum optim.muon_lr_ratio optim.muon_steps",
     lambda c, m: c.optim.kind == "muon", "optim.kind is {optim.kind}; it is for muon"),
    ("optim.decay", lambda c, m: c.optim.weight_decay > 0, "optim.weight-decay is 0"),
    ("optim.min_lr_fraction", lambda c, m: c.optim.schedule != "constant", "optim.schedule is constant"),
    ("optim.decay_fraction", lambda c, m: c.optim.schedule == "wsd", "optim.schedule is {optim.schedule}, not wsd"),
    ("comm.bucket_mib", lambda c, m: c.comm.gradients == "bucketed", "comm.gradients is naive, without buckets"),
    ("comm.algorithm comm.gradients", lambda c, m: m.dp * m.cp > 1, "dp x cp is 1, so no gradients are reduced"),
)  # fmt: skip


def find_warnings(config: Config, mesh: Mesh) -> list[str]:
    """Warn about the settings of a run that have no effect, or hardly any."""
    found = find_unused_options(config, mesh, _OPTION_RULES)
    warmup, steps = config.optim.warmup_steps, config.train.steps
    if warmup > steps and config.optim.warmup_steps != Config().optim.warmup_steps:
        found.append(
            f"optim.warmup-steps is {warmup} and the run has {steps} steps: the learning rate ends at "
            f"{config.optim.lr * steps / warmup:.3g} and never reaches optim.lr {config.optim.lr:g}."
        )
    return found + find_zero_warnings(config, mesh)


def find_zero_warnings(config: Config, mesh: Mesh) -> list[str]:
    """Warn about ZeRO stages that cost communication and save little memory on this mesh."""
    zero, found, ranks = config.zero, [], config.zero.shard_group_size(mesh)
    if zero.stage and ranks == 1:
        found.append(
            f"zero.stage {zero.stage} shards nothing here: dp x cp = 1, so each part of the model is on one rank only. "
            "It costs nothing and saves nothing."
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
    """Return a warning if resuming after `step` steps changes the learning rate of the next step, else None.

    before: the configuration of the run that wrote the checkpoint.
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
