"""The order of composition.

Chapters 01 to 06 gave you one function or class for each kind of parallelism. Apply all that a layout needs to one
plain model, in an order in which no call undoes another one, and connect backward to the gradient reducer.

model: a Transformer with all layers in float32 or float64, whatever the policy is; some parameters may be frozen. It is
changed in place, and every rank gets rank 0's values first. groups: groups["tensor"] is this rank's group of that name,
"tensor" in groups says whether there is one, and groups.get("tensor") is None if not. groups.mesh is the Mesh,
groups.world.rank this rank. These options of config decide what to apply:
    config.parallel.schedule    "gpipe", "1f1b", or "zb-h1", which is 1F1B with split backward
    config.parallel.sequence    True: sequence parallelism;  config.parallel.context: "ring" or "ulysses"
    config.recompute            "block": recompute every block of this stage;  "none"
    config.precision.policy     "fp32", "fp64", "bf16" or "fp16", which needs a LossScaler, too
    config.zero.stage           0 (no ZeRO) to 3;  config.model.num_layers, config.train.micro_batches

parallelize returns ParallelModel(model, specs, layers, reducer, master_specs), a dataclass. specs: of all parameters
and buffers. layers: the range of this stage's layers. master_specs: {name: spec} of the masters; without ZeRO those
in `specs`. The attributes pipeline, tied and scaler are None until you set them.

connect_backward: every gradient of a parameter that is not frozen goes to one function add(name, gradient). It is the
reducer's, or calls it; but on ranks with a group "tied" it is that of a TiedGradient, which adds to the reducer, unless
the embedding is frozen. With more than one stage it also makes the executor, with this stage's actions, the parameters
that are not frozen, and `add`, which a split backward calls itself, as the hooks do not run in it.

Example: 4 layers, hidden size 24, 132 tokens, tied, on a mesh of pp=2, tp=2, with 1F1B and 2 micro-batches. On rank 3
    layers is range(2, 4), and pipeline.actions is [("F", 0), ("B", 0), ("F", 1), ("B", 1)]
    model.model.embed_tokens.weight has the shape (66, 24), and its spec the shape (132, 24), the box from (66, 0) to
    (132, 24) and the replicas (1, 3), because stage 0 has this shard, too; tied is set

Checked: loss, gradients, gradient norm and parameters of a step, with ranks that begin with other values, against one
process in float64: on 1 rank with recomputation; on 2 with each schedule, tied and untied, ring attention and
Ulysses, sequence parallelism, more tensor-parallel ranks than key-value heads, ZeRO 1 to 3; on 4 with two of these at
a time, and on 8 with pp=2, dp=2, tp=2; frozen parameters, which stay as they are, a tied embedding among them; names,
boxes and replicas in specs and master_specs; the executor's actions; that .grad of 16-bit parameters stays None in
backward; that blocks run twice with recomputation and once without; the tokens that a norm sees; and dtypes: with bf16
and fp16 parameters in 16 bits, and masters in float32 with rank 0's exact values; fp32 of a model in float64, and fp64
of one in float32.

You may call:
    broadcast_model(model, group)   all ranks get the values of rank 0 of the group; groups["control"] has all ranks
    named_tensors(model), named_parameters(model) -> {name: tensor}; mesh.coords(rank)["pp"]   a rank's coordinate
    stage_layers(num_layers, num_stages, stage) -> range; keep_stage_modules(model, layers)   nn.Identity for the others
    apply_tensor_parallel(model, group, heads_group, sequence_parallel)   groups "tensor", "heads" (None without one)
    apply_context_parallel(model, group, kind)   group "context"; recompute_block(block)   of model.model.layers
    make_masters(model, dtype) -> {name: master}   converts all parameters; COMPUTE_DTYPES[policy]   the dtype
    describe_tensors(model, shapes, groups) -> specs   collective; shapes: {name: tuple} of the tensors before any split
    make_reducer(model, layers, masters, groups, config)   of ZeRO, too; LossScaler(config.precision)
    describe_shards(specs, reducer, groups)   the specs of a ZeRO reducer's masters; register_gradient_hooks(named, add)
    TiedGradient(EMBEDDING, parameter, group, add)   adds to `add` when both stages are done; has a method add
    gpipe(num_stages, num_micro_batches), one_f_one_b(...) -> [actions of stage 0, ...]; split_backward(actions)
    PipelineExecutor(actions, activations, gradients, named, add)   the groups of these names; named: {name: parameter}

Check it with: python -m exercises check parallel_model

Stub 69a82944.
"""

from torch import nn

from minidist.comm import Groups
from minidist.config import Config
from minidist.parameters import named_parameters
from minidist.simple.context_parallel import apply_context_parallel
from minidist.simple.data_parallel import broadcast_model, register_gradient_hooks
from minidist.simple.mixed_precision import COMPUTE_DTYPES, LossScaler, make_masters
from minidist.simple.parallelize import (
    EMBEDDING,
    ParallelModel,
    describe_shards,
    describe_tensors,
    make_reducer,
    named_tensors,
)
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


def connect_backward(parallel: ParallelModel, groups: Groups, config: Config) -> None:
    """Register hooks that pass gradients to the reducer as backward computes them; build the pipeline's executor."""
    raise NotImplementedError("give all gradients of backward to the reducer, and build the pipeline's executor")


def parallelize(model: nn.Module, groups: Groups, config: Config) -> ParallelModel:
    """Collective: apply pipeline, tensor and context parallelism, recomputation, precision, data parallelism or ZeRO.

    model: a full Transformer, changed in place; all ranks get rank 0's values first. groups: bound from `group_specs`.
    """
    raise NotImplementedError("apply everything that the layout needs, in order, and return this rank's part")
