"""Who holds which elements, and who else: the solution, as it stands in minidist.simple.parallelize.

A list of boxes and ranks is all that the later parts need, so no other part of the trainer knows how a tensor is
split. The norm divides by the number of replicas, the checkpoint saves one of them, repair copies between them. Each
layout that is added later changes this function or none.

The shapes say how a tensor is sharded, and a table of rules by name would say it a second time: the two could differ.
What shapes do not say is who else holds the shard. For tp it follows from the number of shards, for dp and cp from
the group that sums gradients; for the stages the ranks must be asked, because a tied embedding is on two of them
under one name. One exchange of all names is enough. One per tensor would hang, as stages have different numbers of
tensors.

A spec with too few replicas counts an element twice in the norm, one with too many counts it too little. Neither is
visible in the loss before clipping begins.

Usual wrong answers:
* names the ranks of all replicas, though they have other values if they train separately
* moves every dimension of a sharded tensor
* names all ranks with a tensor of this name, whichever part of it they have
* names all ranks with the parameter: of the others each has another range
* names all stages for every tensor
* gathers the names once for each tensor of the largest stage, where one exchange would do
* gives one box around the range: it holds elements of other ranks as well
* takes the global rank for the coordinate on tp: right only if there is no other axis
* the package's own
* gives all tensors to all ranks
* knows of the tied embedding by its name, and of no other tensor on several stages; an untied one has no replica
* compares dp and forgets cp: context-parallel ranks have other ranges
* takes all stages between the first and the last one that have the tensor
* looks at the first two dimensions only
* numbers the shards from the last rank on
* forgets that the tp ranks have replicas of the norms
* gives the shards in turn, and not to consecutive ranks
* names this tp rank only, also where others have the same box: their elements count twice in the norm
* begins a new dictionary for each flat parameter
* counts one shard per rank, so that the boxes of few key-value heads end outside the tensor
* names this rank alone: replicas over tp and stages have the same range
* gives this rank's shape for the full one
* names this stage only: the tied embedding is counted once on each of two
* leaves the buffers out: they are neither saved nor compared
* takes the place in the shard for the place in the parameter
* cuts the range in the full shape: right without tensor parallelism
* takes the group that sums gradients for the replicas: those of tp and pp are missing
* returns lists, which no ParamSpec can be compared or hashed with
* moves the first dimension, whichever is sharded
* takes boxes of this rank's part for boxes of the global tensor
* gathers the tensors with their names: every rank receives the whole model of every other one
* lists the replicas in the order in which it finds them: ranks would choose other owners
* takes every vector for a full one; biases of sharded rows are sharded, too
* forgets the context-parallel ranks
* describes nothing
"""

import math
from collections.abc import Mapping

from torch import nn

from minidist.comm import Groups, all_gather_object
from minidist.parameters import Box, ParamSpec, flat_boxes
from minidist.simple.parallelize import named_tensors
from minidist.simple.zero import ZeroStage1


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
