"""`minidist estimate --parameters N`: the model states of each rank, from the parameter count alone."""

import dataclasses
import json
import math
import textwrap
from dataclasses import dataclass

from minidist.config import Config
from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.precision.policy import Policy, resolve_policy
from minidist.tools.estimate.failures import checkpoint_intervals_json, print_checkpoint_intervals
from minidist.tools.estimate.goodput import FailureModel
from minidist.tools.estimate.states import ModelStates, model_states, moments_per_element, pad_to_shards
from minidist.tools.estimate.table import format_si, print_table
from minidist.tools.simulate.draw import WIDTH
from minidist.validation import validate_numbers, validate_shard_group

OFFLOAD_NOTE = "zero.offload: on CUDA, masters and optimizer states are in host memory; the figures include them."
_NOTE = (
    "The model states are those before an update, without the optimizer's step counters (four bytes per parameter "
    "tensor). Activations, bytes sent and FLOPs depend on the shape of the model: leave --parameters out and give "
    "--model options."
)


@dataclass(frozen=True)
class _ParameterCountEstimate:
    """Bytes of the model states (parameters, gradients, masters, moments) on each rank, from a parameter count.

    mesh, policy: the mesh of ranks and the precision policy. num_parameters: parameters of the model.
    num_local_parameters: those of one rank, num_parameters / (tp * pp) rounded up. num_zero_shards: number of ranks
    over which ZeRO shards the local parameters; 1 without ZeRO. padding_numel: elements added to the local parameters
    so that ZeRO's shards are equal. states: bytes on each rank, equal on all.
    """

    mesh: Mesh
    policy: Policy
    num_parameters: int
    num_local_parameters: int
    num_zero_shards: int
    padding_numel: int
    states: ModelStates


def _estimate_from_parameter_count(config: Config, world_size: int, num_parameters: float) -> _ParameterCountEstimate:
    """Estimate the model states of each rank, with the model divided evenly over tp and pp.

    Raises UserError for an invalid configuration or count, and where the count alone does not determine the states
    (Muon, `--model` options).
    """
    mesh = config.mesh_of(world_size)
    validate_numbers(config)
    if not (1 <= num_parameters < math.inf and num_parameters == int(num_parameters)):
        raise UserError(f"--parameters is {num_parameters:g}; it must be a whole number of at least 1, such as 7.5e9.")
    if config.model != ModelConfig():
        raise UserError(
            f"--parameters {num_parameters:g} and the --model options both give the size of the model. Leave out "
            "--parameters, or the --model options (and [model] in the file)."
        )
    if config.optim.kind == "muon":
        raise UserError(
            "optim.kind is muon, which keeps one moment per element of a layer's matrices and two per element of all "
            "other parameters, and --parameters does not tell them apart. Describe the model with --model options, or "
            "give --optim.kind adamw."
        )
    validate_shard_group(config, mesh)
    policy, shards = resolve_policy(config.precision), config.zero.shard_group_size(config.replica_mesh(mesh))
    local = -(-int(num_parameters) // (mesh.tp * mesh.pp))
    flat_param = pad_to_shards(local, shards, moments_per_element(config.optim, hidden_matrix=False))
    states = model_states([flat_param], config.zero, policy)
    return _ParameterCountEstimate(mesh, policy, int(num_parameters), local, shards, flat_param.numel - local, states)


def main(config: Config, ranks: int, parameters: float, as_json: bool, failures: FailureModel | None) -> int:
    """Estimate the bytes of model states per rank from a parameter count; print them and return exit code 0.

    parameters: the parameter count of the model. as_json: print JSON instead of a table. failures: if given, also print
    the best time between saves. Raises UserError for an invalid configuration or count, and where the count alone does
    not determine the states (Muon, `--model` options).
    """
    result = _estimate_from_parameter_count(config, ranks, parameters)
    if as_json:
        print(json.dumps(_parameter_count_json(result, config) | checkpoint_intervals_json(failures)))
    else:
        _print_parameter_count(result, config)
        print_checkpoint_intervals(failures)
    return 0


def _parameter_count_json(result: _ParameterCountEstimate, config: Config) -> dict:
    """Return the document that `--json` prints."""
    return {
        "world_size": result.mesh.world_size,
        "mesh": result.mesh.sizes,
        "parameters": result.num_parameters,
        "local_parameters": result.num_local_parameters,
        "padding": result.padding_numel,
        "zero": {"stage": config.zero.stage, "shards": result.num_zero_shards},
        "precision": dataclasses.asdict(result.policy),
        "model_state_bytes": result.states.total,
        "model_states": dataclasses.asdict(result.states),
        "notes": _list_notes(config),
    }


def _print_parameter_count(result: _ParameterCountEstimate, config: Config) -> None:
    """Print the estimate as a table."""
    world, policy = result.mesh.world_size, result.policy
    print(f"{world} rank{'s' * (world > 1)}, {result.mesh}; {result.num_parameters:,} {policy.parameter} parameters")
    padded = f" and {result.padding_numel:,} of padding" if result.padding_numel else ""
    shards = f"{result.num_zero_shards} shard{'s' * (result.num_zero_shards > 1)}"
    print(f"ZeRO stage {config.zero.stage}: {result.num_local_parameters:,} parameters{padded} in {shards}\n")
    states = dataclasses.asdict(result.states)
    dtypes = {
        "parameters": policy.parameter,
        "gradients": policy.accumulate,
        "masters": policy.master if policy.separate_masters else "",
        "moments": policy.state,
    }
    rows = [["", "", "each rank"], ["model states", "", format_si(result.states.total, "B")]]
    print_table([*rows, *([f"  {name}", dtypes[name], format_si(size, "B")] for name, size in states.items())])
    print()
    for note in _list_notes(config):
        print(textwrap.fill(note, WIDTH, subsequent_indent="  "))


def _list_notes(config: Config) -> list[str]:
    """Return the notes on what the estimate covers."""
    return [_NOTE, OFFLOAD_NOTE] if config.zero.offload else [_NOTE]
