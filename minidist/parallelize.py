"""Composition: the model that knows nothing of parallelism goes in, the one this rank trains comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from minidist import fit
from minidist.comm import Group, Groups, Use
from minidist.comm.algorithms import ALGORITHMS, Chosen
from minidist.config import Config
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.parallel.context.split import split as split_context
from minidist.parallel.grads import GradSink
from minidist.parallel.pipeline.balance import balance
from minidist.parallel.pipeline.executor import Executor
from minidist.parallel.pipeline.ops import Schedule
from minidist.parallel.pipeline.split import EMBEDDING
from minidist.parallel.pipeline.split import split as split_stages
from minidist.parallel.replicate import gradient_sink, synchronize
from minidist.parallel.tensor.split import Held
from minidist.parallel.tensor.split import split as split_operators
from minidist.spec import Box, ParamSpec, check_covered, named_parameters, ties_of

# Who talks to whom in a step of every layout. "grads": replicas of a parameter that saw other tokens. "loss": ranks
# that see other tokens.
USES: Sequence[Use] = (Use("grads", ("dp", "cp")), Use("loss", ("dp", "cp")))


def uses(mesh: Mesh, config: Config) -> list[Use]:
    """Who talks to whom in a step of this layout, and what for. What one axis needs is there when its size is not 1."""
    found = list(USES)
    if mesh.tp > 1:
        found.append(Use("tensor", ("tp",)))
        found += _summed_over_tensor(mesh.tp, config)
    if mesh.cp > 1:
        found.append(Use("context", ("cp",)))
    if mesh.pp > 1:
        found += [Use("activations", ("pp",)), Use("gradients", ("pp",))]
        ends = _ends(fit.pipeline(config, mesh))
        if config.model.tie_embeddings and len(ends) > 1:
            found.append(Use("tied", ("pp", "dp", "cp"), (("pp", (ends,)),)))
    return found


def _summed_over_tensor(tp: int, config: Config) -> list[Use]:
    """Gradients that are parts of a sum on several ranks of the tp axis."""
    found = []
    if config.parallel.sequence:
        found.append(Use("norms", ("dp", "cp", "tp")))
    heads = config.model.num_kv_heads
    if heads < tp and not (heads == 1 and config.parallel.sequence):  # one head for all is the same ranks
        each = tp // heads
        sets = tuple(tuple(range(head * each, (head + 1) * each)) for head in range(heads))
        found.append(Use("heads", ("dp", "cp", "tp"), (("tp", sets),)))
    return found


def _ends(schedule: Schedule) -> tuple[int, ...]:
    """The stages of the first and of the last part of the model, ascending; one, where both are on the same."""
    return tuple(sorted({schedule.owner(0)[0], schedule.owner(schedule.positions - 1)[0]}))


@dataclass(frozen=True)
class Parallel:
    """A model laid out over ranks.

    model: what this rank runs; specs: the facts about its parameters; sink: where their gradients go.
    pipeline: what runs the model, where it is cut into stages; parts: the layers of each of the model's parts.
    context: how attention sees a sequence that is cut over cp. sequence: whether tp shares it between operators.
    """

    model: nn.Module
    specs: dict[str, ParamSpec]
    sink: GradSink
    pipeline: Executor | None = None
    parts: Sequence[range] = ()
    context: str = "ring"
    sequence: bool = False


def parallelize(model: nn.Module, groups: Groups, config: Config) -> Parallel:
    """Lay `model` out over the mesh of `groups`, bound for `uses`: pipeline, tensor, context, data, in this order.

    model: the whole one; every rank gets the values that rank 0 has.
    """
    mesh = groups.mesh
    for use in ("grads", "tensor", "activations"):  # across one axis after the other, so at last from rank 0
        if use in groups:
            synchronize(model, groups[use])
    ties = ties_of(model)
    shapes = {name: tuple(p.shape) for name, p in named_parameters(model).items()}
    stages = dict.fromkeys(shapes, (mesh.coords(groups.world.rank)["pp"],))
    schedule, parts, used_by = fit.pipeline(config, mesh), [], {}
    if schedule is not None:
        parts = stage_parts(config.model, schedule, config.data.seq_len)
        used_by = split_stages(model, schedule, groups["activations"].rank, parts)
        if config.model.tie_embeddings and EMBEDDING in used_by:
            stages[EMBEDDING] = _ends(schedule)
    held = {name: Held(Box.whole(shapes[name]), (0,)) for name in named_parameters(model)}
    if mesh.tp > 1:
        held = split_operators(model, groups["tensor"], config.parallel.sequence)
    if mesh.cp > 1:
        split_context(model, groups["context"], config.parallel.context)
    specs = {
        name: _spec(name, shapes[name], held[name], stages[name], ties[name], mesh, groups.world.rank) for name in held
    }
    check_covered(model, specs)
    reducing = [reduced_by(config.comm.algorithm, groups[use]) for use in _REDUCING if use in groups]
    sink = gradient_sink(config.comm.gradients, named_parameters(model), specs, reducing, config.comm.bucket_mib)
    pipeline = None
    if schedule is not None:
        shared = [name for name in held if len(stages[name]) > 1]
        between = groups["activations"], groups["gradients"]
        pipeline = Executor(schedule, between, sink, named_parameters(model), used_by, shared)
    sequence = config.parallel.sequence and mesh.tp > 1
    return Parallel(model, specs, sink, pipeline, parts, config.parallel.context, sequence)


# The uses over which gradients are summed.
_REDUCING = ("grads", "norms", "heads", "tied")


def stage_parts(model: ModelConfig, schedule: Schedule, seq_len: int) -> list[range]:
    """The layers of each part of the model, balanced by what a token costs: a head can cost as much as many layers.

    In floating-point operations forward, multiplications and additions: 2 per weight, and 4 h s in attention.
    """
    h, kv = model.hidden_size, model.num_kv_heads * model.head_dim
    layer = 2 * (2 * h * h + 2 * h * kv + 3 * h * model.intermediate_size) + 4 * h * seq_len
    return balance([layer] * model.num_layers, schedule.stages, schedule.chunks, head=2 * h * model.vocab_size)


def _spec(
    name: str, shape: tuple[int, ...], held: Held, stages: Sequence[int], ties: tuple[str, ...], mesh: Mesh, rank: int
) -> ParamSpec:
    """The facts about a parameter that these stages and, in each, these ranks of the tp axis hold."""
    home = mesh.coords(rank)

    def ranks(tensor: Sequence[int]) -> tuple[int, ...]:
        everywhere = mesh.ranks(("pp", "dp", "cp", "tp"), rank)
        return tuple(r for r in everywhere if mesh.coords(r)["pp"] in stages and mesh.coords(r)["tp"] in tensor)

    contributors = ranks(held.holders if held.partial else (home["tp"],))
    return ParamSpec(name, shape, (held.box,), ranks(held.holders), ties, contributors=contributors)


def reduced_by(algorithm: str, group: Group) -> Group:
    """The group, with `algorithm` for its all-reduce: "backend" for the library's, or one of `comm/algorithms`."""
    if algorithm == "backend":
        return group
    return replace(group, algorithm=Chosen(ALGORITHMS["all_reduce"][algorithm]))
