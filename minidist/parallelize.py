"""Composition: the model that knows nothing of parallelism goes in, the one this rank trains comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from minidist.comm import Group, Groups, Use
from minidist.comm.algorithms import ALGORITHMS, Chosen
from minidist.config import Config
from minidist.parallel.grads import GradSink
from minidist.parallel.replicate import gradient_sink, synchronize
from minidist.spec import ParamSpec, check_covered, named_parameters, replicated

# Who talks to whom in a step. "grads": replicas of a parameter. "loss": ranks that see different tokens.
USES: Sequence[Use] = (Use("grads", ("dp", "cp")), Use("loss", ("dp", "cp")))


@dataclass(frozen=True)
class Parallel:
    """A model laid out over ranks.

    model: what this rank runs; specs: the facts about its parameters; sink: where their gradients go.
    """

    model: nn.Module
    specs: dict[str, ParamSpec]
    sink: GradSink


def parallelize(model: nn.Module, groups: Groups, config: Config) -> Parallel:
    """Lay `model` out over the mesh of `groups`, in one fixed order: (today) data parallel."""
    specs = replicated(model, groups["grads"].ranks)
    check_covered(model, specs)
    synchronize(model, groups["grads"])
    grads = reduced_by(config.comm.algorithm, groups["grads"])
    sink = gradient_sink(config.comm.gradients, named_parameters(model), specs, [grads], config.comm.bucket_mib)
    return Parallel(model, specs, sink)


def reduced_by(algorithm: str, group: Group) -> Group:
    """The group, with `algorithm` for its all-reduce: "backend" for the library's, or one of `comm/algorithms`."""
    if algorithm == "backend":
        return group
    return replace(group, algorithm=Chosen(ALGORITHMS["all_reduce"][algorithm]))
