"""Tests of tensor_specs: the test decides which elements each rank holds, and asks where the answer thinks they are.

Every element of the full model has a number of its own, so that the rows and columns of a shard show where it is from.
"""

from types import SimpleNamespace

import torch
from torch import nn

from exercises.testing import Wrong, expect, show, test
from minidist.comm import Group, Groups, Meter
from minidist.config import Config, ConsistencyConfig
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.parameters import Box, ParamSpec
from minidist.simple.parallelize import group_specs

AXES = ("tp", "cp", "dp", "pp")  # the axis that changes fastest first
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def coordinates(rank, mesh):
    """The coordinates of a rank by axis."""
    found = {}
    for axis in AXES:
        found[axis] = rank % getattr(mesh, axis)
        rank //= getattr(mesh, axis)
    return found


def tensors_of_layout(mesh, kv_heads, tied):
    """Shape, dimension that is sharded over tp, number of shards, and stages, of each tensor of the full model."""
    tp, last = mesh.tp, mesh.pp - 1
    head = {0, last} if tied else {0}
    found = {EMBEDDING: ((4 * tp, 3), 0, tp, head), NORM: ((3,), None, 1, {last}), "step": ((), None, 1, {0, last})}
    found["model.scale"] = ((1,), None, 1, set(range(mesh.pp)))
    for layer in range(mesh.pp + 1):
        name, stage = f"model.layers.{layer}", {min(layer, last)}
        shared = min(kv_heads, tp)
        found[f"{name}.self_attn.q_proj.weight"] = ((2 * tp, 2 * tp), 0, tp, stage)
        found[f"{name}.self_attn.q_proj.bias"] = ((2 * tp,), 0, tp, stage)
        found[f"{name}.self_attn.k_proj.bias"] = ((2 * kv_heads,), 0, shared, stage)
        found[f"{name}.self_attn.k_proj.weight"] = ((2 * kv_heads, 5), 0, shared, stage)
        found[f"{name}.mlp.down_proj.weight"] = ((3, 5 * tp), 1, tp, stage)
        found[f"{name}.mlp.mask"] = ((2, 3, 2 * tp), 2, tp, stage)
        found[f"{name}.input_layernorm.weight"] = ((5,), None, 1, stage)
    return found


def box_of(shape, dim, num_shards, tp_rank, tp):
    """Start and stop of the shard of one tensor-parallel rank."""
    start, stop = [0] * len(shape), list(shape)
    if dim is not None:
        size, ranks_per_shard = shape[dim] // num_shards, tp // num_shards
        start[dim] = tp_rank // ranks_per_shard * size
        stop[dim] = start[dim] + size
    return tuple(start), tuple(stop)


def model_of(rank, mesh, layout):
    """A module with this rank's shards. Masks and scalars are buffers."""
    root, at = nn.Module(), coordinates(rank, mesh)
    for name, (shape, dim, num_shards, stages) in layout.items():
        if at["pp"] not in stages:
            continue
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        start, stop = box_of(shape, dim, num_shards, at["tp"], mesh.tp)
        full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        own = full[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))].clone()
        if last in ("mask", "step"):
            module.register_buffer(last, own, persistent=last == "step")
        else:
            module.register_parameter(last, nn.Parameter(own))
    return root


def replicas_of(name, rank, mesh, layout, num_models):
    """All ranks that hold the same elements of a tensor: any dp and cp of this replica, any stage that has it."""
    shape, dim, num_shards, stages = layout[name]
    own, at, found = box_of(shape, dim, num_shards, coordinates(rank, mesh)["tp"], mesh.tp), coordinates(rank, mesh), []
    for peer in range(mesh.pp * mesh.dp * mesh.cp * mesh.tp):
        there = coordinates(peer, mesh)
        same_model = there["dp"] * num_models // mesh.dp == at["dp"] * num_models // mesh.dp
        if same_model and there["pp"] in stages and box_of(shape, dim, num_shards, there["tp"], mesh.tp) == own:
            found.append(peer)
    return tuple(found)


def groups_of(world, control, mesh, config):
    """All groups of this rank; only "control" can communicate."""
    found = {"control": Group("control", control.ranks, control.rank, control.process_group, world, control.meter)}
    for spec in group_specs(mesh, config):
        for ranks in spec.rank_groups(mesh):
            if world.rank in ranks:
                found[spec.name] = Group(spec.name, ranks, ranks.index(world.rank), None, world, control.meter)
    return Groups(mesh, world, Meter(), (), found)


def describe(mesh, kv_heads, tied, num_models):
    """A line on a layout for the message."""
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes.items() if size > 1)
    case = f"mesh {sizes or 'of one rank'}" + f", {kv_heads} key-value heads" * (kv_heads < mesh.tp)
    return case + ", tied embeddings" * tied + f", {num_models} replicas that train separately" * (num_models > 1)


def check_spec(what, got, name, shape, boxes, replicas, case):
    """Fail unless a spec is the expected one; an error in a shard must show start and stop."""
    if not isinstance(got, ParamSpec):
        raise Wrong("type", f"{what} must be a ParamSpec", "a ParamSpec", show(got), case=case)
    expect(f"name and shape in {what}", (got.name, got.shape), (name, shape), case=case)
    expect(f"the boxes in {what}", [(box.start, box.stop) for box in got.boxes], boxes, case=case)
    kinds = [type(each).__name__ for each in (got.boxes, got.replicas)]
    expect(f"the types of boxes and replicas in {what}", kinds, ["tuple", "tuple"], case=case)
    expect(f"the replicas in {what}", got.replicas, replicas, case=case)


def check_layout(answer, world, network, kv_heads=None, tied=False, num_models=1, **sizes):
    """Describe all tensors of one layout on live ranks, and compare with what the test has put there."""
    mesh = Mesh(**sizes)
    kv_heads = kv_heads or 2 * mesh.tp  # divides by tp, so that all shards are equal
    merging = ConsistencyConfig(mode="local", replicas=num_models) if num_models > 1 else ConsistencyConfig()
    model = ModelConfig(num_kv_heads=kv_heads, num_heads=kv_heads, tie_embeddings=tied)
    groups = groups_of(world, network.group, mesh, Config(model=model, consistency=merging))
    layout, case = tensors_of_layout(mesh, kv_heads, tied), describe(mesh, kv_heads, tied, num_models)
    shapes = {name: shape for name, (shape, *_) in layout.items()}
    own = model_of(world.rank, mesh, layout)
    specs = answer.describe_tensors(own, shapes, groups)
    names = [name for name, (*_, stages) in layout.items() if coordinates(world.rank, mesh)["pp"] in stages]
    expect("the names of the tensors described, sorted", sorted(specs), sorted(names), case=case)
    for name in names:
        shape, dim, num_shards, _ = layout[name]
        box = box_of(shape, dim, num_shards, coordinates(world.rank, mesh)["tp"], mesh.tp)
        replicas = replicas_of(name, world.rank, mesh, layout, num_models)
        check_spec(f"the spec of {name}", specs[name], name, shape, [box], replicas, case)


@test(points=5, ranks=(1, 2, 3, 4))
def boxes_of_tensor_parallelism(answer, world, network):
    """Rows, columns, the last of three dimensions, full tensors and scalars: the box of each, and who has the same."""
    check_layout(answer, world, network, tp=world.size)
    check_layout(answer, world, network, dp=world.size)
    if world.size == 4:
        check_layout(answer, world, network, dp=2, tp=2)
        check_layout(answer, world, network, cp=2, tp=2)


@test(points=3, ranks=(2, 4, 6))
def few_key_value_heads(answer, world, network):
    """With fewer key-value heads than ranks, consecutive ranks have the same box of k_proj."""
    for kv_heads in (1, 2, 3):
        if world.size % kv_heads == 0:
            check_layout(answer, world, network, tp=world.size, kv_heads=kv_heads)
    if world.size == 4:
        check_layout(answer, world, network, dp=2, tp=2, kv_heads=1)


@test(points=4, ranks=(2, 3, 4))
def tensors_of_stages(answer, world, network):
    """A tensor that several stages have, such as a tied embedding, has replicas on all of them and nowhere else."""
    for tied in (False, True):
        check_layout(answer, world, network, pp=world.size, tied=tied)
        if world.size == 4:
            check_layout(answer, world, network, pp=2, dp=2, tied=tied)
            check_layout(answer, world, network, pp=2, tp=2, tied=tied, kv_heads=1)


@test(points=3, ranks=(2, 4, 6))
def separate_replicas(answer, world, network):
    """Replicas that train separately have other values: each spec names the ranks of its own replica only."""
    check_layout(answer, world, network, dp=world.size, num_models=2)
    if world.size == 4:
        check_layout(answer, world, network, dp=4, num_models=4)
        check_layout(answer, world, network, dp=2, tp=2, kv_heads=1, num_models=2)
        check_layout(answer, world, network, pp=2, dp=2, tied=True, num_models=2)
    if world.size == 6:
        check_layout(answer, world, network, dp=6, num_models=3)
        check_layout(answer, world, network, dp=2, cp=3, num_models=2)


@test(points=3, ranks=(8,))
def all_axes_at_once(answer, world, network):
    """Eight ranks on three axes, with tied embeddings and shared key-value heads."""
    check_layout(answer, world, network, pp=2, dp=2, tp=2, kv_heads=1, tied=True)
    check_layout(answer, world, network, pp=2, cp=2, tp=2, tied=True)
    check_layout(answer, world, network, pp=2, dp=2, tp=2, kv_heads=1, tied=True, num_models=2)


@test(points=1, ranks=(3,))
def one_exchange_of_names(answer, world, network):
    """The number of collectives does not depend on the number of tensors, nor their bytes on the tensors' sizes."""

    def count(call):
        before = len(network.records)
        call()
        return len(network.records) - before, sum(record.payload_bytes for record in network.records[before:])

    def describe_linear(size):
        groups = groups_of(world, network.group, Mesh(pp=3), Config(model=ModelConfig(tie_embeddings=False)))
        few = nn.Linear(size, 2)
        shapes = {name: tuple(tensor.shape) for name, tensor in few.named_parameters()}
        return lambda: answer.describe_tensors(few, shapes, groups)

    many, _ = count(lambda: check_layout(answer, world, network, pp=3))
    few, small = count(describe_linear(world.rank + 1))
    expect("the collectives of one call", few, many, case="two tensors on each rank, compared with up to seventeen")
    _, large = count(describe_linear(5000))
    case = "a tensor of 40,000 bytes instead of one of at most 24"
    expect("whether this rank exchanges over 1,000 bytes more", large - small > 1000, False, case=case)


# -- shards of ZeRO ---------------------------------------------------------------------------------------------------


def boxes_of_range(shape, start, stop):
    """Boxes of a flat range: row by row, with full rows joined. Derived here element by element."""
    if len(shape) < 2:
        return [((start,), (stop,))] if shape else [((), ())]
    columns, boxes = shape[1], []
    for row in range(shape[0]):
        first, last = max(start, row * columns), min(stop, (row + 1) * columns)
        if first >= last:
            continue
        left, right = first - row * columns, last - row * columns
        is_full = (left, right) == (0, columns)
        if is_full and boxes and boxes[-1][0][1] == 0 and boxes[-1][1][1] == columns:
            boxes[-1] = (boxes[-1][0], (row + 1, columns))
        else:
            boxes.append(((row, left), (row + 1, right)))
    return boxes


def ranges_of(specs, num_shards, number):
    """The flat ranges of each parameter in shard `number` of their concatenation, as FlatParameter.places has them."""
    total = sum(spec.boxes[0].numel for spec in specs.values())
    size, offset, found = -(-total // num_shards), 0, {}
    for name, spec in specs.items():
        start = max(offset, number * size)
        stop = min(offset + spec.boxes[0].numel, (number + 1) * size)
        if start < stop:
            found[name] = (slice(start - number * size, stop - number * size), start - offset)
        offset += spec.boxes[0].numel
    return found


def check_shards(answer, mesh, specs_of, num_models=1):
    """Describe the shards of every rank of a mesh, one after the other: no rank communicates."""
    num_shards = mesh.dp // num_models * mesh.cp
    for rank in range(mesh.world_size):
        at, specs = coordinates(rank, mesh), specs_of(rank)
        number = at["dp"] % (mesh.dp // num_models) * mesh.cp + at["cp"]
        first = dict(list(specs.items())[:1])
        rest = {name: spec for name, spec in specs.items() if name not in first}
        flats = [SimpleNamespace(places=ranges_of(part, num_shards, number)) for part in (first, rest)]
        groups = SimpleNamespace(mesh=mesh, world=SimpleNamespace(rank=rank, size=mesh.world_size))
        got = answer.describe_shards(specs, SimpleNamespace(flat_params=flats), groups)
        case = (
            f"rank {rank} of {describe(mesh, 8, False, num_models)}; its flat range is shard {number} of {num_shards}"
        )
        names = [name for flat in flats for name in flat.places]
        expect("the names of the tensors described, sorted", sorted(got), sorted(names), case=case)
        for flat in flats:
            for name, (place, offset) in flat.places.items():
                (box,) = specs[name].boxes
                boxes = boxes_of_range(box.shape, offset, offset + place.stop - place.start)
                moved = [tuple(tuple(map(sum, zip(end, box.start, strict=True))) for end in each) for each in boxes]
                peers = [peer for peer in specs[name].replicas if is_same_shard(peer, rank, mesh)]
                check_spec(f"the spec of {name}", got[name], name, specs[name].shape, moved, tuple(peers), case)


def is_same_shard(peer, rank, mesh):
    """Whether two ranks with the same parameter have the same shard of its flat range."""
    there, here = coordinates(peer, mesh), coordinates(rank, mesh)
    return (there["dp"], there["cp"]) == (here["dp"], here["cp"])


@test(points=4)
def shards_of_full_parameters(answer):
    """Data parallelism only: shards end inside rows, a parameter is on several ranks, and a scalar on one."""
    shapes = {"a": (5, 3), "b": (7, 2), "c": (), "d": (11,), "e": (1, 9)}
    for sizes in ({"dp": 1}, {"dp": 2}, {"dp": 3}, {"dp": 2, "cp": 2}, {"dp": 7}):
        mesh = Mesh(**sizes)
        everyone = tuple(range(mesh.world_size))
        specs = {n: ParamSpec(n, shape, (Box.whole(shape),), everyone) for n, shape in shapes.items()}
        check_shards(answer, mesh, lambda rank, specs=specs: specs)


@test(points=4)
def shards_of_sharded_parameters(answer):
    """With tensor and pipeline parallelism the range is one of a box, and its replicas are on other axes."""
    for sizes, num_models in (
        ({"tp": 2}, 1),
        ({"dp": 2, "tp": 2}, 1),
        ({"dp": 3, "tp": 2}, 1),
        ({"pp": 2, "dp": 2, "tp": 2}, 1),
        ({"dp": 2, "cp": 2, "tp": 2}, 1),
        ({"dp": 4, "tp": 2}, 2),
    ):
        mesh = Mesh(**sizes)
        layout = {
            "rows": ((4 * mesh.tp, 3), 0, mesh.tp, set(range(mesh.pp))),
            "columns": ((5, 2 * mesh.tp), 1, mesh.tp, {0, mesh.pp - 1}),
            "norm": ((7,), None, 1, set(range(mesh.pp))),
        }

        def specs_of(rank, mesh=mesh, layout=layout, num_models=num_models):
            found = {}
            for name, (shape, dim, num_shards, _) in layout.items():
                box = Box(*box_of(shape, dim, num_shards, coordinates(rank, mesh)["tp"], mesh.tp))
                found[name] = ParamSpec(name, shape, (box,), replicas_of(name, rank, mesh, layout, num_models))
            return found

        check_shards(answer, mesh, specs_of, num_models)
