"""What is known of a run from the number of its parameters alone: how its model states are shared out."""

import dataclasses
import json
import math
import textwrap
from dataclasses import dataclass

from minidist.config import Config
from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.precision.policy import Policy, policy_of
from minidist.tools.estimate.states import ModelStates, model_states, moments_of, row_of
from minidist.tools.estimate.table import scaled, table
from minidist.tools.simulate.draw import WIDTH
from minidist.validation import validate_numbers, validate_shard_group

_NOTE = (
    "Model states are what there is before an update; activations, messages and FLOPs need a model's shape "
    "(--model...), and so do the optimizer's counts of steps, four bytes a parameter tensor."
)


@dataclass(frozen=True)
class Counted:
    """parameters: of the model; held: of one rank's part of it, where tp and pp cut it; padding: what makes them divide
    into `shards`, 1 where nothing is shared out; states: bytes of each rank."""

    mesh: Mesh
    policy: Policy
    parameters: int
    held: int
    shards: int
    padding: int
    states: ModelStates


def counted(config: Config, world_size: int, parameters: float) -> Counted:
    """The model states of each rank, the model being cut evenly over tp and pp. Raises UserError for what cannot be."""
    mesh = config.mesh_of(world_size)
    validate_numbers(config)
    if not (1 <= parameters < math.inf and parameters == int(parameters)):
        raise UserError(f"--parameters is {parameters:g}; it is a whole number, 1 or more: --parameters 7.5e9, say.")
    if config.model != ModelConfig():
        raise UserError(
            f"--parameters {parameters:g} and the options of a model both say how large it is. Leave --parameters out, "
            "or --model... (and [model] in the file)."
        )
    if config.optim.kind == "muon":
        raise UserError(
            "optim.kind is muon, which keeps one number for each element of a layer's matrix and two for all else, and "
            "--parameters does not say which are which. Describe the model with --model..., or give --optim.kind adamw."
        )
    validate_shard_group(config, mesh)
    policy, shards = policy_of(config.precision), config.zero.shard_group_size(mesh)
    held = -(-int(parameters) // (mesh.tp * mesh.pp))
    row = row_of(held, shards, moments_of(config.optim, hidden_matrix=False))
    states = model_states([row], config.zero, policy)
    return Counted(mesh, policy, int(parameters), held, shards, row.numel - held, states)


def main(config: Config, ranks: int, parameters: float, as_json: bool) -> int:
    """Work out, and print; returns the exit code. Raises UserError for what cannot be."""
    found = counted(config, ranks, parameters)
    if as_json:
        print(json.dumps(document(found, config)))
    else:
        show(found, config)
    return 0


def document(found: Counted, config: Config) -> dict:
    """What a number of parameters tells, for `--json`."""
    return {
        "world_size": found.mesh.world_size,
        "mesh": found.mesh.sizes,
        "parameters": found.parameters,
        "parameters_held": found.held,
        "padding": found.padding,
        "zero": {"stage": config.zero.stage, "shards": found.shards},
        "precision": dataclasses.asdict(found.policy),
        "model_state_bytes": found.states.total,
        "model_states": dataclasses.asdict(found.states),
        "notes": _notes(config),
    }


def show(found: Counted, config: Config) -> None:
    """Print it."""
    world, policy = found.mesh.world_size, found.policy
    print(f"{world} rank{'s' * (world > 1)}, {found.mesh}; {found.parameters:,} {policy.parameter} parameters")
    padded = f" with {found.padding:,} of padding" if found.padding else ""
    print(f"ZeRO stage {config.zero.stage}: {found.held:,}{padded} in {found.shards} shard{'s' * (found.shards > 1)}\n")
    parts = dataclasses.asdict(found.states)
    formats = {
        "parameters": policy.parameter,
        "gradients": policy.accumulate,
        "masters": policy.master if policy.separate_masters else "",
        "moments": policy.state,
    }
    rows = [["", "", "each rank"], ["model states", "", scaled(found.states.total, "B")]]
    table([*rows, *([f"  {name}", formats[name], scaled(size, "B")] for name, size in parts.items())])
    print()
    for note in _notes(config):
        print(textwrap.fill(note, WIDTH, subsequent_indent="  "))


def _notes(config: Config) -> list[str]:
    on_host = "On CUDA, masters and moments are in the host's memory (zero.offload)."
    return [_NOTE, on_host] if config.zero.offload else [_NOTE]
