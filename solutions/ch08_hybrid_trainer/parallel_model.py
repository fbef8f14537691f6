"""The order of composition: the solution, as it stands in minidist.simple.parallelize.

Each kind of parallelism was written without knowledge of the others. They fit together because each leaves the names
of parameters and the interfaces of modules as they are, and because they are applied in one order: first the calls
that replace parameters, then those that read them. A master, a flat buffer or a hook that was made of a tensor which
a later call replaces is a silent fault: the run goes on and updates a tensor that no forward reads.

Three facts are lost on the way and must be read first: the values of rank 0 in full precision, the shapes of the
unsplit tensors, and the number of the stage. Everything else is found in the end: the specs describe the tensors that
have remained, and the masters are those of the reducer, with ZeRO a flat range of each parameter.

Hooks are last because they close the graph: every gradient leaves backward through one `add`. On the stages that
share the embedding a TiedGradient stands before the reducer, both for hooks and for a split backward: with two
entrances, half of the gradient would reach the reducer without the other stage's part.

Usual wrong answers:
* ignores the schedule
* always recomputes
* always uses ring attention, with the tokens of Ulysses
* runs zb-h1 as plain 1F1B
* sends rank 0's values after the conversion to 16 bits: the masters are each rank's own
* sends the values of the first data shard only: the other tensor-parallel ranks and stages keep their own
* the package's own
* gives every rank the first stage
* leaves parameters in the model's dtype with fp32 and fp64
* gives the executor the reducer's add: with a split backward the tied gradient gets nothing
* gives every stage the actions of the first
* looks for the tied embedding among the parameters that are not frozen
* makes a TiedGradient of a frozen embedding: the reducer gets a gradient of a parameter that it does not know
* leaves the gradients of a shared key-value head partial
* gives hooks the reducer's add: the tied gradient gets nothing
* makes the masters of the unsplit tensors, which no forward reads
* describes masters of frozen parameters, too
* keeps each rank's own initial values
* registers no hooks: the reducer gets nothing
* does not recompute
* never scales the loss
* leaves out sequence parallelism
* gives the optimizer the 16-bit parameters
* scales the loss with bf16, too
* reads the shapes of the shards: the specs say that each rank has whole tensors
* reads the shapes of the parameters and not of the buffers
* describes ZeRO's masters as full parameters
* takes the rank modulo pp for the stage
* gives the reducer both parts of the tied gradient without their sum
* applies nothing: every rank has the whole model
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
