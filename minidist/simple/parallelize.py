"""Composition: all parallelisms of a layout, applied to one plain model in one fixed order.

`group_specs` declares the process groups, `parallelize` returns this rank's part of the model with its gradient
reducer, `describe_tensors` says which box of each global tensor this rank holds, and which ranks hold the same one.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from minidist.comm import Group, Groups, GroupSpec, all_gather_object
from minidist.config import Config
from minidist.mesh import AXES, Mesh
from minidist.parameters import Box, ParamSpec, flat_boxes, named_parameters
from minidist.simple.collectives import ALL_REDUCE
from minidist.simple.context_parallel import apply_context_parallel
from minidist.simple.data_parallel import (
    BucketedReducer,
    NaiveReducer,
    Tensors,
    broadcast_model,
    register_gradient_hooks,
)
from minidist.simple.mixed_precision import COMPUTE_DTYPES, LossScaler, make_masters
from minidist.simple.pipeline import (
    PipelineExecutor,
    TiedGradient,
    gpipe,
    keep_stage_modules,
    one_f_one_b,
    split_backward,
    stage_layers,
)
from minidist.simple.recompute import recompute_block
from minidist.simple.tensor_parallel import apply_tensor_parallel
from minidist.simple.zero import ZeroStage1, ZeroStage2, ZeroStage3

EMBEDDING = "model.embed_tokens.weight"


def group_specs(mesh: Mesh, config: Config) -> list[GroupSpec]:
    """Return the process groups of a layout, in the order in which all ranks create them.

    grads: the ranks with the same parameters and different tokens. tensor, context, activations, gradients: the ranks
    of one axis. heads: tp ranks with a replica of the same key-value heads. tied: the first and last stage. If replicas
    train separately (local SGD, DiLoCo), grads lies inside a replica, replica has all its ranks, and outer has the
    ranks with the same coordinates in each replica.
    """
    num_replicas = config.num_replicas(mesh)
    dp_per_replica = mesh.dp // num_replicas
    replicas = tuple(tuple(range(first, first + dp_per_replica)) for first in range(0, mesh.dp, dp_per_replica))
    within_replica = (("dp", replicas),)
    across_replicas = (("dp", tuple(zip(*replicas, strict=True))),)
    specs = [GroupSpec("grads", ("dp", "cp"), within_replica)]
    if num_replicas > 1:
        specs.append(GroupSpec("replica", AXES, within_replica))
        specs.append(GroupSpec("outer", ("dp",), across_replicas))
    if mesh.tp > 1:
        specs.append(GroupSpec("tensor", ("tp",)))
    kv_heads = config.model.num_kv_heads
    if kv_heads < mesh.tp:
        shared_by = mesh.tp // kv_heads
        sets = tuple(tuple(range(head * shared_by, (head + 1) * shared_by)) for head in range(kv_heads))
        specs.append(GroupSpec("heads", ("tp",), (("tp", sets),)))
    if mesh.cp > 1:
        specs.append(GroupSpec("context", ("cp",)))
    if mesh.pp > 1:
        specs += [GroupSpec("activations", ("pp",)), GroupSpec("gradients", ("pp",))]
        if config.model.tie_embeddings:
            specs.append(GroupSpec("tied", ("pp",), (("pp", ((0, mesh.pp - 1),)),)))
    return specs


@dataclass
class ParallelModel:
    """This rank's part of a model.

    specs: of its parameters and buffers, by name. layers: the range of layers of its stage. reducer: sums gradients
    over the ranks; its masters are what the optimizer updates. master_specs: which elements of the global parameters
    these are. pipeline, tied, scaler: None without pipeline, tied embedding or loss scaling.
    """

    model: nn.Module
    specs: dict[str, ParamSpec]
    layers: range
    reducer: NaiveReducer | ZeroStage1
    master_specs: dict[str, ParamSpec]
    pipeline: PipelineExecutor | None = None
    tied: TiedGradient | None = None
    scaler: LossScaler | None = None


def parallelize(model: nn.Module, groups: Groups, config: Config) -> ParallelModel:
    """Collective: apply pipeline, tensor and context parallelism, recomputation, precision, data parallelism or ZeRO.

    model: a full Transformer, changed in place; all ranks get rank 0's values first. groups: bound from `group_specs`.
    """
    mesh, rank = groups.mesh, groups.world.rank
    broadcast_model(model, groups["control"])
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    layers = stage_layers(config.model.num_layers, mesh.pp, mesh.coords(rank)["pp"])
    if mesh.pp > 1:
        keep_stage_modules(model, layers)
    if mesh.tp > 1:
        apply_tensor_parallel(model, groups["tensor"], groups.get("heads"), config.parallel.sequence)
    if mesh.cp > 1:
        apply_context_parallel(model, groups["context"], config.parallel.context)
    if config.recompute == "block":
        for index in layers:
            recompute_block(model.model.layers[index])
    masters = make_masters(model, COMPUTE_DTYPES[config.precision.policy])
    specs = describe_tensors(model, shapes, groups)
    reducer = make_reducer(model, layers, masters, groups, config)
    parallel = ParallelModel(model, specs, layers, reducer, {name: specs[name] for name in masters})
    if config.zero.stage:
        parallel.master_specs = describe_shards(specs, reducer, groups)
    if config.precision.policy == "fp16":
        parallel.scaler = LossScaler(config.precision)
    connect_backward(parallel, groups, config)
    return parallel


class AlgorithmReducer(NaiveReducer):
    """Gradient reducer that sums by an all-reduce of `collectives`, in place of the backend's. algorithm: its name."""

    def __init__(self, parameters: Tensors, masters: Tensors, group: Group, algorithm: str):
        super().__init__(parameters, masters, group)
        self.all_reduce = ALL_REDUCE[algorithm]

    def reduce_sums(self) -> None:
        """Collective: sum over the ranks, one parameter after the other."""
        for total in self.sums.values():
            self.all_reduce(total, self.group)


def make_reducer(
    model: nn.Module, layers: range, masters: Mapping[str, Tensor], groups: Groups, config: Config
) -> NaiveReducer | ZeroStage1:
    """Return the gradient reducer that the configuration asks for."""
    parameters = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    if config.zero.stage:
        blocks = {model.model.layers[index]: [] for index in layers}
        for name in parameters:
            if match := re.match(r"model\.layers\.(\d+)\.\w+\.", name):  # a parameter of this layer
                blocks[model.model.layers[int(match[1])]].append(name)
            elif "tied" in groups and name == "model.norm.weight":  # leaves both stages' root the embedding alone, so
                blocks[model.model.norm] = [name]  # that the same ranges of it are replicas of each other
        stages = {1: ZeroStage1, 2: ZeroStage2, 3: partial(ZeroStage3, prefetch=config.zero.prefetch)}
        return stages[config.zero.stage](parameters, masters, blocks, groups["grads"])
    num_micro_batches = config.train.micro_batches
    if config.comm.algorithm != "backend":
        return AlgorithmReducer(parameters, masters, groups["grads"], config.comm.algorithm)
    if config.comm.gradients == "naive":
        return NaiveReducer(parameters, masters, groups["grads"], num_micro_batches)
    bucket_bytes = int(config.comm.bucket_mib * 2**20)
    return BucketedReducer(parameters, masters, groups["grads"], num_micro_batches, bucket_bytes=bucket_bytes)


def connect_backward(parallel: ParallelModel, groups: Groups, config: Config) -> None:
    """Register hooks that pass gradients to the reducer as backward computes them; build the pipeline's executor."""
    parameters = {name: p for name, p in named_parameters(parallel.model).items() if p.requires_grad}
    add = parallel.reducer.add
    if "tied" in groups and EMBEDDING in parameters:  # on the first and the last stage, unless it is frozen
        parallel.tied = TiedGradient(EMBEDDING, parameters[EMBEDDING], groups["tied"], add)
        add = parallel.tied.add
    register_gradient_hooks(parameters, add)
    if groups.mesh.pp > 1:
        schedule = gpipe if config.parallel.schedule == "gpipe" else one_f_one_b
        actions = schedule(groups.mesh.pp, config.train.micro_batches)[groups["activations"].rank]
        if config.parallel.schedule == "zb-h1":
            actions = split_backward(actions)
        parallel.pipeline = PipelineExecutor(actions, groups["activations"], groups["gradients"], parameters, add)


# -- who holds what ---------------------------------------------------------------------------------------------------


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a model by name."""
    return {**named_parameters(model), **dict(model.named_buffers())}


def describe_tensors(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], groups: Groups) -> dict[str, ParamSpec]:
    """Collective: return the spec of each parameter and buffer of this rank: its box of the global tensor, and all
    ranks with the same box.

    shapes: of the unsplit model's tensors, by name.
    """
    mesh = groups.mesh
    home = mesh.coords(groups.world.rank)
    names_of_ranks = all_gather_object(list(named_tensors(model)), groups["control"])
    specs = {}
    for name, tensor in named_tensors(model).items():
        own, full = tuple(tensor.shape), shapes[name]
        num_shards = math.prod(full) // tensor.numel()  # over tp; fewer than ranks for few key-value heads
        index = home["tp"] * num_shards // mesh.tp
        start = tuple(index * a if a < b else 0 for a, b in zip(own, full, strict=True))
        box = Box(start, tuple(a + b for a, b in zip(start, own, strict=True)))
        stages = {mesh.coords(peer)["pp"] for peer, names in enumerate(names_of_ranks) if name in names}
        tp_coords = [tp for tp in range(mesh.tp) if tp * num_shards // mesh.tp == index]
        replicas = [
            mesh.rank(pp=stage, dp=coords["dp"], cp=coords["cp"], tp=tp)
            for coords in map(mesh.coords, groups["grads"].ranks)
            for stage in stages
            for tp in tp_coords
        ]
        specs[name] = ParamSpec(name, full, (box,), tuple(sorted(replicas)))
    return specs


def describe_shards(specs: Mapping[str, ParamSpec], reducer: ZeroStage1, groups: Groups) -> dict[str, ParamSpec]:
    """Return the spec of each master of ZeRO: the boxes of a flat range of the parameter that this rank has.

    specs: of the parameters. Of the ranks with the same parameter, those with the same dp and cp coordinates have the
    same range of it.
    """
    mesh, rank = groups.mesh, groups.world.rank
    home = mesh.coords(rank)
    shard_specs = {}
    for flat in reducer.flat_params:
        for name, (place, offset) in flat.places.items():
            (box,) = specs[name].boxes
            boxes = flat_boxes(box.shape, offset, offset + place.stop - place.start)
            moved = tuple(each.shifted(box.start) for each in boxes)
            replicas = [
                peer
                for peer in specs[name].replicas
                if all(mesh.coords(peer)[axis] == home[axis] for axis in ("dp", "cp"))
            ]
            shard_specs[name] = ParamSpec(name, specs[name].shape, moved, tuple(replicas))
    return shard_specs
