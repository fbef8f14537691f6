"""Tests of training_step: steps of each layout, taken by the answer, beside one process in float64."""

import math

import torch

from exercises.hybrid_run import (
    RATES,
    UNUSED,
    OneProcess,
    Run,
    Shards,
    join_samples,
    make_config,
    make_groups,
    make_model,
    make_samples,
)
from exercises.testing import expect, test
from minidist.comm import all_gather_object
from minidist.simple.parallelize import parallelize

TIED = {"model__tie_embeddings": True}
DROPOUT = {"model__dropout": 0.2}
CLIP = {"optim__clip_norm": 0.05}  # smaller than every norm here
# By world size: the name of a layout, its mesh, and its other options.
LAYOUTS = {
    2: [
        ("data parallelism, the second data shard with weight 0.5", {"dp": 2}, CLIP),
        ("tensor parallelism", {"tp": 2}, CLIP | {"model__num_kv_heads": 1}),
        ("pipeline, tied embedding", {"pp": 2}, CLIP | TIED),
        ("ring attention", {"cp": 2}, {}),
        ("ZeRO stage 1", {"dp": 2}, {"zero__stage": 1}),
        ("ZeRO stage 2", {"dp": 2}, {"zero__stage": 2} | CLIP),
        ("ZeRO stage 3 with recomputation", {"dp": 2}, {"zero__stage": 3, "recompute": "block"}),
    ],
    4: [
        (
            "pipeline and sequence parallelism, dropout",
            {"pp": 2, "tp": 2},
            TIED | DROPOUT | {"parallel__sequence": True},
        ),
        ("data parallelism and pipeline, ZeRO stage 2", {"dp": 2, "pp": 2}, TIED | CLIP | {"zero__stage": 2}),
        ("data and context parallelism", {"dp": 2, "cp": 2}, {"parallel__context": "ulysses"}),
    ],
}
SCALED = {"precision__policy": "fp16", "precision__initial_scale": 64.0, "precision__growth_interval": 1}


def make_run(answer, world, config, shards=None, has_unused=False):
    """Return a run of the answer's engine on a layout."""
    groups = make_groups(world, config)
    parallel = parallelize(make_model(config, world.rank, has_unused=has_unused), groups, config)
    shards = shards or Shards.of(config, groups.mesh.dp)
    return Run(answer.Engine(parallel, groups, config), parallel, groups, shards)


def trains_as_one_process(answer, world, layouts, steps):
    """Train in each layout; compare with one process."""
    for case, mesh, changes in layouts:
        run = make_run(answer, world, make_config(mesh, **changes))
        one = OneProcess(run.shards)
        for step in range(steps):
            run.expect_step(one, step, case)


@test(points=3)
def one_rank_trains(answer, world, network):
    """On one rank three steps are those of one process: with dropout, evaluations, and norms below clip_norm."""
    for clip_norm in (None, 100.0, 0.05):
        run = make_run(answer, world, make_config({}, **DROPOUT, optim__clip_norm=clip_norm), has_unused=True)
        one = OneProcess(run.shards, has_unused=True)
        for step in range(3):
            run.expect_step(one, step, f"one rank, dropout, clip_norm {clip_norm}, evaluations between the steps")
            expect("the gradient of an unused parameter", run.gradients[UNUSED], None)
            run.engine.evaluate([join_samples(make_samples(9, 2))])
    run, events = make_run(answer, world, make_config({})), []
    end_micro_batch = run.parallel.reducer.end_micro_batch

    def note_end():
        events.append("end_micro_batch")
        end_micro_batch()

    run.parallel.reducer.end_micro_batch = note_end
    next(run.parallel.model.parameters()).register_hook(lambda _: events.append("backward"))
    run.step(0, RATES[0])
    expected = ["backward", "end_micro_batch"] * run.engine.config.train.micro_batches
    expect("backward of each micro-batch and calls of reducer.end_micro_batch, in order", events, expected)


@test(points=3, ranks=(1, 2))
def step_without_tokens(answer, world, network):
    """If no label counts on any rank, nothing changes, and the next step is right; one rank without any is fine."""
    config = make_config({"dp": world.size})
    run = make_run(answer, world, config, Shards.of(config, world.size, silent=(1,)))
    one, case = OneProcess(run.shards), "no label counts in step 1"
    run.expect_step(one, 0, case)
    before, forwards = run.tensors(), []
    handle = run.parallel.model.register_forward_hook(lambda *_: forwards.append("forward"))
    run.expect_step(one, 1, case)
    expect_unchanged(run, before, f"{case}; step 1")
    last = world.size - 1
    decision = run.step(1, RATES[1], stop_requested=world.rank == last)
    told = f"{case}; step 1 once more, in which rank {last} asks for the end"
    expect("stop_requested", decision.stop_requested, True, case=told)
    expect_unchanged(run, before, told)
    handle.remove()
    expect("the forwards of the model in a step without tokens", len(forwards), 0, case=case)
    run.expect_step(one, 2, case)
    if world.size == 2:
        run = make_run(answer, world, config, Shards(config, (0, 5), (1.0, 2.0)))
        one = OneProcess(run.shards)
        for step in range(2):
            run.expect_step(one, step, "rank 0 has no samples")


def expect_unchanged(run, before, case):
    """Fail unless masters, parameters and optimizer states have the bits of `before`."""
    after = run.tensors()
    expect("the names of masters, parameters and optimizer states", sorted(after), sorted(before), case=case)
    for name, tensor in before.items():
        expect(f"the {name} after a step that all ranks must skip", after[name], tensor, case=case)


@test(points=5, ranks=(2,))
def each_axis_trains(answer, world, network):
    """With each kind of parallelism on two ranks, two steps are those of one process."""
    trains_as_one_process(answer, world, LAYOUTS[2], 2)


@test(points=4, ranks=(2,))
def one_bad_rank_stops_all(answer, world, network):
    """Infinity in one rank's gradients, or NaN in its loss: no rank updates, and the next step is right."""
    for name, mesh, stage in (("dp=2, ZeRO stage 1", {"dp": 2}, 1), ("tp=2", {"tp": 2}, 0)):
        for rank, kind in ((0, "NaN in the loss"), (1, "infinity in a gradient")):
            config = make_config(mesh, optim__clip_norm=1.0, zero__stage=stage)
            run = make_run(answer, world, config)
            one, case = OneProcess(run.shards), f"{name}; {kind} of rank {rank} in step 1"
            run.expect_step(one, 0, case)
            before, loss = run.tensors(), run.parallel.model.loss
            if world.rank == rank:
                spoil(run, kind)
            decision = run.step(1, RATES[1])
            run.parallel.model.loss, run.spoil = loss, lambda: None
            expect_unchanged(run, before, case)
            told = decision.update_successful, decision.is_finite, math.isnan(decision.grad_norm)
            expect("update_successful, is_finite, whether the norm is NaN", told, (False, False, True), case=case)
            run.expect_step(one, 2, f"{case}; the next one")


def spoil(run, kind):
    """Let the next step of this rank go wrong: backward of one micro-batch, or the sum of one gradient."""
    if kind == "NaN in the loss":
        loss = run.parallel.model.loss
        run.parallel.model.loss = lambda *args: (loss(*args)[0] * math.nan, torch.tensor(1))
        return

    def put_infinity():
        masters = run.parallel.reducer.masters
        name = next(name for name in masters if "mlp.up_proj" in name)  # sharded by tensor parallelism and by ZeRO
        masters[name].grad.view(-1)[0] = math.inf

    run.spoil = put_infinity


@test(points=4, ranks=(1, 2))
def the_loss_scale_is_removed(answer, world, network):
    """In fp16 norm and update are those of float64 while the scale doubles and halves; parameters are the masters."""
    config = make_config({"dp": world.size}, **SCALED, optim__kind="sgd", optim__weight_decay=0.0)
    run = make_run(answer, world, config)
    one = OneProcess(run.shards)
    scales = []
    for step in range(4):
        case = f"fp16, a scale of 64 that doubles after each good step; step {step}"
        if step == 2:
            case += ", infinity in a summed gradient"
            spoil(run, "infinity in a gradient")
        before = run.tensors()
        decision = run.step(step, RATES[0])
        run.spoil = lambda: None
        scales.append(run.parallel.scaler.scale)
        expect("overflowed", decision.overflowed, step == 2, case=case)
        if step == 2:
            expect_unchanged(run, before, case)
            continue
        one.step(step, RATES[0])
        expect("the loss", decision.loss, one.loss, case=case, tolerance=0.02)
        expect("the gradient norm", decision.grad_norm, one.norm, case=case, tolerance=0.05 * one.norm)
        changes = [(tensor - before[name]).square().sum() for name, tensor in run.tensors().items() if "master" in name]
        change, wanted = sum(changes).sqrt().item(), RATES[0] * one.norm
        expect("the length of the masters' change by SGD", change, wanted, case=case, tolerance=0.05 * wanted)
        expect_rounded(run, case)
    expect("the loss scale after each step", scales, [128.0, 256.0, 128.0, 256.0], case="64 at the start")
    masters = run.parallel.reducer.masters.values()
    for master in masters:
        master.grad = torch.full_like(master, 1e25)
    wanted = 1e50 * sum(master.numel() for master in masters)
    got = sum(all_gather_object(run.engine.squared_norm(), network.group))
    case = "every element of the gradients is 1e25, whose square is finite in float64 and not in float32"
    expect("the squared norm, summed over the ranks", got, wanted, case=case, tolerance=1e-6 * wanted)


def expect_rounded(run, case):
    """Fail unless the parameters are the masters in their own dtype."""
    for name, parameter in run.parallel.model.named_parameters():
        master = run.parallel.reducer.masters[name].detach()
        expect(f"the parameter {name}", parameter, master.to(parameter.dtype), case=case)


@test(points=1, ranks=(2,))
def a_request_to_stop_is_known_to_all(answer, world, network):
    """All ranks' decisions have the request of any rank, and none if no rank asks."""
    run = make_run(answer, world, make_config({"dp": 2}))
    for step, asking in enumerate((None, 1, 0)):
        decision = run.step(step, RATES[step], stop_requested=world.rank == asking)
        case = f"rank {asking} asks for the end" if asking is not None else "no rank asks for the end"
        expect("stop_requested", decision.stop_requested, asking is not None, case=case)


@test(points=2, ranks=(2, 4))
def replicas_merge(answer, world, network):
    """Replicas that train separately merge by the tokens of their updates; a skipped update does not count."""
    changes = {"consistency__mode": "local", "consistency__h": 2, "train__steps": 4, "consistency__replicas": 2}
    config = make_config({"dp": world.size}, precision__policy="bf16", **changes)
    sizes = {2: (4, 1), 4: (2, 1, 1, 1)}[world.size]
    shards = Shards(config, sizes, weights=(1.0, 0.5, 0.25, 1.0)[: world.size], silent=(3,))
    run = make_run(answer, world, config, shards)
    first = world.rank // (world.size // 2) * (world.size // 2)
    replica = range(first, first + world.size // 2)  # the ranks of this replica
    case = (
        f"local SGD in bf16, 2 replicas of {len(replica)} ranks, a merge every 2 steps; rank 0 overflows in steps 1, 2"
    )
    given = note_merges(run.engine.merger)
    for step in range(4):
        if step in (1, 2) and world.rank == 0:
            spoil(run, "infinity in a gradient")
        decision = run.step(step, RATES[0])
        run.spoil = lambda: None
        is_bad, told = step in (1, 2) and 0 in replica, f"{case}; step 3 has no tokens; step {step}"
        expect("update_successful", decision.update_successful, not is_bad and step < 3, case=told)
        tokens = 0.0
        for rank in () if is_bad else replica:
            counts = [batch.num_loss_tokens for batch in run.shards.micro_batches(step, rank)]
            tokens += run.shards.weights[rank] * sum(counts)
        expect("the steps and tokens that the merger was told", given, [(step, tokens)], case=told)
        given.clear()
        expect_rounded(run, told)
        if step % 2:
            for name, master in run.parallel.reducer.masters.items():
                values = all_gather_object(master.tolist(), network.group)
                expect(f"ranks whose master of {name} is rank 0's", values.count(values[0]), world.size, case=told)


def note_merges(merger):
    """Return a list to which each call of the merger's `after_step` adds its arguments."""
    given, after_step = [], merger.after_step

    def noted(step, num_tokens):
        given.append((step, num_tokens))
        return after_step(step, num_tokens)

    merger.after_step = noted
    return given


@test(points=4, ranks=(4,))
def two_axes_train(answer, world, network):
    """With two kinds of parallelism on four ranks, two steps are those of one process."""
    trains_as_one_process(answer, world, LAYOUTS[4], 2)
