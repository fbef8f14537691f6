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
from minidist.tools.estimate.states import ModelStates, model_states, moments_of, row_of
from minidist.tools.estimate.table import format_si, print_table
from minidist.tools.simulate.draw import WIDTH
from minidist.validation import validate_numbers, validate_shard_group

_NOTE = (
    "Model states are counted before an update. Activations, messages and FLOPs need the model's shape (--model...), "
    "and so do the optimizer's step counters, four bytes per parameter tensor."
)


@dataclass(frozen=True)
class ParameterCountEstimate:
    """Model states from a parameter count. parameters: of the model; local_parameters: of one tp and pp shard of it;
    padding: elements added so that ZeRO's `shards` are equal (shards is 1 without ZeRO); states: bytes of each rank."""

    mesh: Mesh
    policy: Policy
    parameters: int
    local_parameters: int
    shards: int
    padding: int
    states: ModelStates


def estimate_from_parameter_count(config: Config, world_size: int, parameters: float) -> ParameterCountEstimate:
    """The model states of each rank, with the model split evenly over tp and pp. Raises UserError for an invalid
    configuration or count, and where the count alone does not determine the states."""
    mesh = config.mesh_of(world_size)
    validate_numbers(config)
    if not (1 <= parameters < math.inf and parameters == int(parameters)):
        raise UserError(f"--parameters is {parameters:g}; it is a whole number, 1 or more: --parameters 7.5e9, say.")
    if config.model != ModelConfig():
        raise UserError(
            f"--parameters {parameters:g} and the options of a model both give its size. Leave --parameters out, "
            "or --model... (and [model] in the file)."
        )
    if config.optim.kind == "muon":
        raise UserError(
            "optim.kind is muon, which keeps one number per element of a layer's matrices and two for all else, and "
            "--parameters does not tell them apart. Describe the model with --model..., or give --optim.kind adamw."
        )
    validate_shard_group(config, mesh)
    policy, shards = resolve_policy(config.precision), config.zero.shard_group_size(mesh)
    local = -(-int(parameters) // (mesh.tp * mesh.pp))
    row = row_of(local, shards, moments_of(config.optim, hidden_matrix=False))
    states = model_states([row], config.zero, policy)
    return ParameterCountEstimate(mesh, policy, int(parameters), local, shards, row.numel - local, states)


def main(config: Config, ranks: int, parameters: float, as_json: bool) -> int:
    """Estimate and print; returns the exit code. Raises UserError as `estimate_from_parameter_count` does."""
    found = estimate_from_parameter_count(config, ranks, parameters)
    if as_json:
        print(json.dumps(parameter_count_json(found, config)))
    else:
        print_parameter_count(found, config)
    return 0


def parameter_count_json(found: ParameterCountEstimate, config: Config) -> dict:
    """The whole estimate, for `--json`."""
    return {
        "world_size": found.mesh.world_size,
        "mesh": found.mesh.sizes,
        "parameters": found.parameters,
        "local_parameters": found.local_parameters,
        "padding": found.padding,
        "zero": {"stage": config.zero.stage, "shards": found.shards},
        "precision": dataclasses.asdict(found.policy),
        "model_state_bytes": found.states.total,
        "model_states": dataclasses.asdict(found.states),
        "notes": _notes(config),
    }


def print_parameter_count(found: ParameterCountEstimate, config: Config) -> None:
    """Print the estimate as a table."""
    world, policy = found.mesh.world_size, found.policy
    print(f"{world} rank{'s' * (world > 1)}, {found.mesh}; {found.parameters:,} {policy.parameter} parameters")
    padded = f" and {found.padding:,} of padding" if found.padding else ""
    shards = f"{found.shards} shard{'s' * (found.shards > 1)}"
    print(f"ZeRO stage {config.zero.stage}: {found.local_parameters:,} parameters{padded} in {shards}\n")
    parts = dataclasses.asdict(found.states)
    dtypes = {
        "parameters": policy.parameter,
        "gradients": policy.accumulate,
        "masters": policy.master if policy.separate_masters else "",
        "moments": policy.state,
    }
    rows = [["", "", "each rank"], ["model states", "", format_si(found.states.total, "B")]]
    print_table([*rows, *([f"  {name}", dtypes[name], format_si(size, "B")] for name, size in parts.items())])
    print()
    for note in _notes(config):
        print(textwrap.fill(note, WIDTH, subsequent_indent="  "))


def _notes(config: Config) -> list[str]:
    on_host = "On CUDA, masters and moments are in the host's memory (zero.offload)."
    return [_NOTE, on_host] if config.zero.offload else [_NOTE]
