"""Who holds which elements, and who else.

Gradient norm, checkpoint, repair and parity all ask one question: which elements of the full model does this rank hold,
and which other ranks hold the same ones? Answer it once, as a ParamSpec for each tensor, by looking at the shapes.

describe_tensors: model has this rank's shards; shapes are those of the full model, {name: tuple}. tp shards a tensor in
one dimension, into equal shards, or not at all. How many shards there are follows from the numbers of elements of the
full tensor and of this rank's. Their number divides tp. If there are fewer than tp (few key-value heads), consecutive
tp ranks hold the same shard. Ranks that differ in dp or cp hold the same elements; if replicas train separately, only
those in one replica do. Each stage has tensors of its own, and some tensors are on several stages (a tied embedding is
on two): only the ranks of a stage know which tensors it has. Result: {name: ParamSpec(name, full shape, (box,),
replicas)} for every parameter and buffer of this rank; replicas are the ascending global ranks with this box, this rank
included.

Example: Mesh(pp=2, dp=2, tp=2), rank 5 (pp 1, dp 0, tp 1), with a tied embedding of shape (8, 3) and a norm (3,):
    "model.embed_tokens.weight"   here (4, 3): box (4, 0) to (8, 3), replicas (1, 3, 5, 7): both stages and dp, tp 1
    "model.norm.weight"           here (3,), full, on stage 1: box (0,) to (3,), replicas (4, 5, 6, 7)

describe_shards: with ZeRO a rank holds flat ranges of its parameters. specs: those of describe_tensors. Of each flat
parameter, `places` (5.2) is {name: (slice of the shard, offset of its first element in the flattened parameter)}.
Result: {name: ParamSpec} for all names in places: the boxes of the range in the global tensor, in memory order, and, of
the ranks with the same parameter, those with this rank's dp and cp coordinates, which have the same range of it.

Example: box (4, 0) to (8, 3) of the embedding is this rank's, and (slice(0, 5), 2) its place: elements 2 to 6 of 12.
These are row 0 from column 2 on, row 1, and column 0 of row 2, 4 rows further down in the global tensor: the boxes
(4, 2) to (5, 3), (5, 0) to (6, 3), and (6, 0) to (7, 1).

Checked: name, shape, boxes and replicas, both tuples, of all specs, on 1 to 8 ranks with one to three axes; rows,
columns, the last of three dimensions, vectors, scalars and buffers; 1 to 6 key-value heads; tied and untied embeddings
on 1 to 4 stages; replicas that train separately; that the number of collectives does not depend on the number of
tensors, nor the bytes sent on their sizes. describe_shards must not communicate: it is called with an object that has
groups.mesh and groups.world only, and one that has reducer.flat_params only.

You may call:
    named_tensors(model) -> {name: tensor}   all parameters and buffers; tensor.shape, tensor.numel(), math.prod(shape)
    groups.mesh, groups.world.rank   the mesh; this rank   groups["control"]   the group of all ranks
    groups["grads"].ranks   the global ranks that differ from this one in dp or cp, inside its replica (8.1)
    mesh.coords(rank) -> {"pp": int, "dp": int, "cp": int, "tp": int}; mesh.rank(pp=0, dp=0, cp=0, tp=0) -> int
    all_gather_object(value, group) -> list   of the values of all ranks, in rank order
    ParamSpec(name, shape, boxes: tuple, replicas: tuple); Box(start: tuple, stop: tuple), box.start, box.shape
    flat_boxes(shape, start, stop) -> list   the boxes of a flat range; box.shifted(offset: tuple) -> Box
    reducer.flat_params   a list of FlatParameter, each with `places`

Check it with: python -m exercises check tensor_specs

Stub 6146c6f1.
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
    raise NotImplementedError("return the boxes and the replicas of this rank's flat ranges")


def describe_tensors(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], groups: Groups) -> dict[str, ParamSpec]:
    """Collective: return the spec of each parameter and buffer of this rank: its box of the global tensor, and all
    ranks with the same box.

    shapes: of the unsplit model's tensors, by name.
    """
    raise NotImplementedError("return the box and the replicas of every tensor of this rank")
