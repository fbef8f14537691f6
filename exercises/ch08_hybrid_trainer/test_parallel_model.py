"""Tests of parallel_model: a step of each layout, made of the answer's parts, beside one process in float64."""

import torch

from exercises.hybrid_run import FROZEN, RATES, SEQ, OneProcess, Run, Shards, make_config, make_groups, make_model
from exercises.testing import Wrong, expect, test
from minidist.mesh import Mesh
from minidist.simple.engine import Engine
from minidist.simple.mixed_precision import LossScaler
from minidist.simple.parallelize import EMBEDDING

BUFFER = "model.scale"  # which the test adds
TIED = {"model__tie_embeddings": True}
ONE_HEAD = {"model__num_kv_heads": 1}
# By world size: the name of a layout, its mesh, and its other options.
LAYOUTS = {
    1: [("one rank", {}, {}), ("one rank with recomputation", {}, {"recompute": "block"})],
    2: [
        ("data parallelism", {"dp": 2}, {}),
        ("data parallelism, naive reducer", {"dp": 2}, {"comm__gradients": "naive", **TIED}),
        ("pipeline, GPipe", {"pp": 2}, {"parallel__schedule": "gpipe"}),
        ("pipeline, 1F1B, tied embedding", {"pp": 2}, TIED),
        ("pipeline, split backward, tied embedding", {"pp": 2}, {"parallel__schedule": "zb-h1", **TIED}),
        ("pipeline, tied embedding, which is frozen", {"pp": 2}, TIED),
        ("tensor parallelism, tied embedding", {"tp": 2}, TIED),
        ("sequence parallelism, one key-value head", {"tp": 2}, {"parallel__sequence": True, **ONE_HEAD}),
        ("ring attention", {"cp": 2}, {}),
        ("Ulysses", {"cp": 2}, {"parallel__context": "ulysses"}),
        ("ZeRO stage 1", {"dp": 2}, {"zero__stage": 1}),
        ("ZeRO stage 2", {"dp": 2}, {"zero__stage": 2, **TIED}),
        ("ZeRO stage 3", {"dp": 2}, {"zero__stage": 3}),
    ],
    4: [
        (
            "pipeline and tensor parallelism, tied embedding",
            {"pp": 2, "tp": 2},
            {"parallel__schedule": "zb-h1", **TIED},
        ),
        ("data and tensor parallelism, ZeRO stage 1", {"dp": 2, "tp": 2}, {"zero__stage": 1, **ONE_HEAD}),
        ("context and sequence parallelism", {"cp": 2, "tp": 2}, {"parallel__sequence": True, "recompute": "block"}),
        ("data parallelism and pipeline, ZeRO stage 1, tied embedding", {"dp": 2, "pp": 2}, {"zero__stage": 1, **TIED}),
    ],
    8: [("pp=2, dp=2, tp=2, tied embedding", {"pp": 2, "dp": 2, "tp": 2}, {**TIED, **ONE_HEAD})],
}
# The dimension along which tensor parallelism shards a weight.
DIMS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}
DIMS |= {"embed_tokens": 0, "lm_head": 0}


def build(answer, world, config, frozen=()):
    """Return what the answer makes of a model of which every rank has other values, and the groups."""
    groups = make_groups(world, config)
    return answer.parallelize(make_model(config, world.rank, frozen), groups, config), groups


def trains_as_one_process(answer, world, layouts, steps=1):
    """Train in each layout; compare with one process."""
    for case, mesh, changes in layouts:
        config = make_config(mesh, **changes)
        frozen = () if "ZeRO" in case else (*FROZEN, EMBEDDING) if "which is frozen" in case else FROZEN
        parallel, groups = build(answer, world, config, frozen)
        shards = Shards.of(config, groups.mesh.dp)
        run = Run(Engine(parallel, groups, config), parallel, groups, shards)
        one = OneProcess(shards, frozen)
        for step in range(steps):
            run.expect_step(one, step, case)


@test(points=2)
def one_rank_trains(answer, world, network):
    """On one rank two steps are those of one process, also with recomputation and frozen parameters."""
    trains_as_one_process(answer, world, LAYOUTS[1], steps=2)


@test(points=3, ranks=(1, 2, 4))
def every_tensor_has_a_spec(answer, world, network):
    """The specs name all of this rank's tensors: the box of the unsplit tensor, and the ranks that have this box."""
    for mesh in ({1: [{}], 2: [{"dp": 2}, {"pp": 2}, {"tp": 2}], 4: [{"pp": 2, "tp": 2}]})[world.size]:
        config = make_config(mesh, **TIED, **ONE_HEAD)
        groups = make_groups(world, config)
        model, full = make_model(config, world.rank, FROZEN), dict(make_model(config, 0).named_parameters())
        model.model.register_buffer(BUFFER.rpartition(".")[2], torch.ones(2, 3) * world.rank)
        full[BUFFER] = torch.zeros(2, 3)
        parallel = answer.parallelize(model, groups, config)
        case = f"{Mesh(**mesh)}, tied, one key-value head, frozen parameters, a buffer"
        stages = {stage: names_of_stage(full, stage, groups.mesh.pp) for stage in range(groups.mesh.pp)}
        coords = groups.mesh.coords(world.rank)
        own = stages[coords["pp"]]
        expect("layers", list(parallel.layers), layers_of(coords["pp"], groups.mesh.pp), case=case)
        expect("the names in specs", sorted(parallel.specs), own, case=case)
        expect(
            "the buffer", dict(parallel.model.named_buffers())[BUFFER], full[BUFFER], case=f"{case}: zeros on rank 0"
        )
        trained = [name for name in own if name not in (*FROZEN, BUFFER)]
        expect("the names in master_specs", sorted(parallel.master_specs), trained, case=case)
        for name in own:
            specs = {"specs": parallel.specs[name], "master_specs": parallel.master_specs.get(name)}
            for kind, spec in [each for each in specs.items() if each[1] is not None]:
                box, tps = box_of(name, full[name], groups.mesh.tp, coords["tp"])
                replicas = [
                    groups.mesh.rank(pp=stage, dp=dp, tp=tp)
                    for stage, names in stages.items()
                    for dp in range(groups.mesh.dp)
                    for tp in tps
                    if name in names
                ]
                what = f'{kind}["{name}"]'
                expect(f"the shape in {what}", list(spec.shape), list(full[name].shape), case=case)
                expect(f"the boxes in {what}", [(b.start, b.stop) for b in spec.boxes], [box], case=case)
                expect(f"the replicas in {what}", list(spec.replicas), sorted(replicas), case=case)


def layers_of(stage, num_stages):
    return [0, 1, 2] if num_stages == 1 else [[0, 1], [2]][stage]


def names_of_stage(full, stage, num_stages):
    """Return the names of the parameters of a stage of a model with a tied embedding."""
    layers = {f"model.layers.{index}." for index in layers_of(stage, num_stages)}
    is_last = stage == num_stages - 1
    return sorted(
        name
        for name in full
        if name in (EMBEDDING, BUFFER)
        or (name == "model.norm.weight" and is_last)
        or any(name.startswith(layer) for layer in layers)
    )


def box_of(name, full, tp, tp_rank):
    """Return start and stop of a rank's box, and the tensor-parallel coordinates of all ranks that have it."""
    start, stop, module = [0] * full.ndim, list(full.shape), name.split(".")[-2]
    if module not in DIMS or module in ("k_proj", "v_proj"):  # all ranks have the only key-value head
        return (tuple(start), tuple(stop)), range(tp)
    dim = DIMS[module]
    size = full.shape[dim] // tp
    start[dim], stop[dim] = size * tp_rank, size * (tp_rank + 1)
    return (tuple(start), tuple(stop)), [tp_rank]


@test(points=6, ranks=(2,))
def each_axis_trains(answer, world, network):
    """With each kind of parallelism on two ranks, a step is that of one process."""
    trains_as_one_process(answer, world, LAYOUTS[2])


@test(points=2, ranks=(2,))
def the_executor_runs_the_schedule(answer, world, network):
    """The pipeline's executor has the actions of this stage; pipeline and tied are None on a layout without them."""
    forwards, backwards = [("F", i) for i in range(3)], [("B", i) for i in range(3)]
    alternating = [each for pair in zip(forwards, backwards, strict=True) for each in pair]
    early = [forwards[0], *[each for i in (1, 2) for each in (forwards[i], backwards[i - 1])], backwards[2]]
    split = [[], []]
    for stage, actions in enumerate((early, alternating)):
        for kind, i in actions:
            split[stage].append((kind, i))
            if kind == "B" and i:
                split[stage].append(("W", i - 1))
        split[stage].append(("W", 2))
    schedules = {"gpipe": [forwards + backwards] * 2, "1f1b": [early, alternating], "zb-h1": split}
    for schedule, actions in schedules.items():
        config = make_config({"pp": 2}, parallel__schedule=schedule, train__micro_batches=3)
        parallel, _ = build(answer, world, config)
        case = f"2 stages, 3 micro-batches, {schedule}, not tied"
        if parallel.pipeline is None:
            raise Wrong("wrong", "pipeline", "a PipelineExecutor", "None", case=case)
        expect("the executor's actions", list(parallel.pipeline.actions), actions[world.rank], case=case)
        expect("tied", parallel.tied, None, case=case)
    parallel, _ = build(answer, world, make_config({"dp": 2}, **TIED))
    expect("pipeline and tied", (parallel.pipeline, parallel.tied), (None, None), case="dp=2, tied embedding")


@test(points=3, ranks=(1, 2))
def sixteen_bits_have_masters(answer, world, network):
    """In 16 bits the masters are float32 and have rank 0's exact values; backward leaves .grad of parameters None.

    With fp32 and fp64 the masters are the parameters, in this dtype, whatever the model's was.
    """
    for policy, before, dtype in (("fp32", torch.float64, torch.float32), ("fp64", torch.float32, torch.float64)):
        config = make_config({"dp": world.size}, precision__policy=policy)
        parallel = answer.parallelize(make_model(config, world.rank).to(before), make_groups(world, config), config)
        first, case = make_model(config, 0).to(before), f"{policy}, a model in {before}".replace("torch.", "")
        for (name, parameter), value in zip(parallel.model.named_parameters(), first.parameters(), strict=True):
            expect(f"dtype of {name}", str(parameter.dtype), str(dtype), case=case)
            expect(f"dtype of the master of {name}", str(parallel.reducer.masters[name].dtype), str(dtype), case=case)
            expect(name, parameter.detach(), value.detach().to(dtype), case=case)
    for policy, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        config = make_config({"dp": world.size}, precision__policy=policy)
        parallel, groups = build(answer, world, config)
        first = dict(make_model(config, 0).named_parameters())
        expect("the names of the masters", sorted(parallel.reducer.masters), sorted(first), case=policy)
        for name, parameter in parallel.model.named_parameters():
            master = parallel.reducer.masters[name]
            expect(f"dtype of {name}", str(parameter.dtype), str(dtype), case=policy)
            expect(f"dtype of the master of {name}", str(master.dtype), "torch.float32", case=policy)
            expect(f"the master of {name}", master.detach(), first[name].detach(), case=policy)
            expect(name, parameter.detach(), first[name].detach().to(dtype), case=policy)
        scaled = isinstance(parallel.scaler, LossScaler)
        expect("whether there is a LossScaler", scaled, policy == "fp16", case=policy)
        run = Run(Engine(parallel, groups, config), parallel, groups, Shards.of(config, world.size))
        run.step(0, RATES[0])
        grads = [name for name, parameter in parallel.model.named_parameters() if parameter.grad is not None]
        expect("parameters whose .grad is not None after a step", grads, [], case=policy)
        for name, parameter in parallel.model.named_parameters():
            expect(f"{name} after a step", parameter, parallel.reducer.masters[name].to(dtype), case=policy)


@test(points=2, ranks=(1, 2))
def recomputation_repeats_the_blocks(answer, world, network):
    """With recomputation the blocks of this stage run twice in each micro-batch, otherwise once."""
    for recompute, runs in (("block", 2), ("none", 1)):
        config = make_config({"pp": world.size}, recompute=recompute)
        parallel, groups = build(answer, world, config)
        seen: list[int] = []
        for index in parallel.layers:
            block = parallel.model.model.layers[index]
            block.mlp.register_forward_hook(lambda *_, seen=seen, index=index: seen.append(index))
        run = Run(Engine(parallel, groups, config), parallel, groups, Shards.of(config, 1))
        run.step(0, RATES[0])
        counts = {index: seen.count(index) for index in parallel.layers}
        case = f"recompute={recompute!r}, 2 micro-batches, {groups.mesh}"
        expect("how often each block runs in a step", counts, dict.fromkeys(parallel.layers, 2 * runs), case=case)


@test(points=1, ranks=(2,))
def norms_see_their_tokens(answer, world, network):
    """With sequence parallelism a norm of two ranks sees half of the tokens, without it all of them."""
    for sequence, length in ((True, SEQ // 2), (False, SEQ)):
        config = make_config({"tp": 2}, parallel__sequence=sequence)
        parallel, groups = build(answer, world, config)
        seen: list[int] = []
        norm = parallel.model.model.layers[0].input_layernorm
        norm.register_forward_hook(lambda _, args, __, seen=seen: seen.append(args[0].shape[1]))
        run = Run(Engine(parallel, groups, config), parallel, groups, Shards.of(config, 1))
        run.step(0, RATES[0])
        case = f"tp=2, sequences of {SEQ} tokens, 2 micro-batches, sequence={sequence}"
        expect("the tokens that a norm sees", seen, [length, length], case=case)


@test(points=4, ranks=(4,))
def two_axes_train(answer, world, network):
    """With two kinds of parallelism on four ranks, a step is that of one process."""
    trains_as_one_process(answer, world, LAYOUTS[4])


@test(points=1, ranks=(8,))
def three_axes_train(answer, world, network):
    """With pipeline, data and tensor parallelism on eight ranks, a step is that of one process."""
    trains_as_one_process(answer, world, LAYOUTS[8])
