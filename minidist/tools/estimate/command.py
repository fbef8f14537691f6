"""`minidist estimate`: what a layout costs, as a table and as JSON."""

import dataclasses
import json
import textwrap
from collections.abc import Callable
from operator import attrgetter

from minidist.config import Config
from minidist.tools.estimate import activations, blocks, compute, utilisation
from minidist.tools.estimate.estimate import MEMORY, SEGMENTS, Estimate, RankCost, estimate
from minidist.tools.estimate.notes import notes
from minidist.tools.estimate.table import scaled, table
from minidist.tools.estimate.utilisation import Measured
from minidist.tools.simulate.command import as_json as pipeline_json
from minidist.tools.simulate.draw import WIDTH

_COLUMNS = 6  # of the table, side by side


def main(config: Config, ranks: int, t_comm: float, as_json: bool, measured: Measured | None = None) -> int:
    """Estimate, and print; returns the exit code. Raises UserError for what cannot run."""
    found = estimate(config, ranks, t_comm=t_comm)
    if as_json:
        print(json.dumps(document(found, measured)))
    else:
        show(found, measured)
    return 0


def document(found: Estimate, measured: Measured | None = None) -> dict:
    """All that is known, for `--json`: of the model, of a step, of the pipeline, and of every rank."""
    layout, config = found.layout, found.layout.config
    model, seq_len, batch = config.model, config.data.seq_len, config.train.global_batch
    per_token, (flops, hardware) = model.flops_per_token(seq_len), _flops(found)
    return {
        "world_size": layout.mesh.world_size,
        "mesh": layout.mesh.sizes,
        "dtype": layout.dtype,
        "parameters": model.num_parameters(),
        "tokens_per_step": batch * seq_len,
        "flops_per_token": per_token,
        "flops_per_step": flops,
        "hardware_flops_per_step": hardware,
        **utilisation.document(measured, flops, hardware, layout.mesh.world_size),
        "pipeline": None if found.timeline is None else pipeline_json(found.timeline),
        "stages": [
            [[part.layers.start, part.layers.stop] for part in layout.chunks(stage)] for stage in range(layout.mesh.pp)
        ],
        "layer_keeps": _layer_keeps(found),
        "ranks": [_rank(cost) for cost in found.ranks],
        "notes": notes(found),
    }


def _flops(found: Estimate) -> tuple[int, int]:
    """Of a step: those of the model, and with what is computed again."""
    config = found.layout.config
    tokens, model = config.train.global_batch * config.data.seq_len, config.model
    again = model.num_layers * compute.recomputed_per_layer(found.layout)
    return model.flops_per_token(config.data.seq_len) * tokens, (
        model.flops_per_token(config.data.seq_len) + again
    ) * tokens


def _rank(cost: RankCost) -> dict:
    return dataclasses.asdict(cost) | {"model_state_bytes": cost.model_state_bytes, "memory_bytes": cost.memory_bytes}


def _layer_keeps(found: Estimate) -> list[dict]:
    """The tensors that one layer keeps for backward of the first micro-batch, which is the largest."""
    layout = found.layout
    samples = max(layout.micro_batches(dp)[0] for dp in range(layout.mesh.dp))
    tensors = activations.on_a_rank(layout, blocks.layer(layout), samples)
    return [tensor._asdict() | {"bytes": tensor.bytes} for tensor in tensors]


def show(found: Estimate, measured: Measured | None = None) -> None:
    """Print what is the same for all ranks, a table with a column for each stage, and what is not in it."""
    layout, config = found.layout, found.layout.config
    world, batch, seq_len = layout.mesh.world_size, config.train.global_batch, config.data.seq_len
    per_token, (flops, hardware) = config.model.flops_per_token(seq_len), _flops(found)
    ranks = f"{world} rank{'s' * (world > 1)}, {layout.mesh}"
    print(f"{ranks}; {config.model.num_parameters():,} {layout.dtype} parameters")
    parts = config.train.micro_batches
    print(f"a step: {batch} samples x {seq_len} tokens, {parts} micro-batch{'es' * (parts > 1)} a rank")
    computed = f"; {scaled(hardware)} with what is computed again" if hardware > flops else ""
    print(f"FLOPs: {scaled(per_token)} a token, {scaled(flops)} a step{computed}")
    if measured is not None:
        print(utilisation.line(measured, flops, hardware, world))
    if (line := found.timeline) is not None:
        live = " ".join(map(str, line.peak_live))
        print(f"pipeline: {line.schedule.kind}, bubble {line.bubble:.4f}; micro-batches alive, stage by stage: {live}")
    rows = _rows(found)
    for first in range(0, layout.mesh.pp, _COLUMNS):
        print()
        table([[name, *cells[first : first + _COLUMNS]] for name, cells in rows])
    print()
    for note in notes(found):
        print(textwrap.fill(note, WIDTH, subsequent_indent="  "))


def _rows(found: Estimate) -> list[tuple[str, list[str]]]:
    """The lines of the table: a name, and for every stage what its ranks have, the largest where they differ."""
    layout = found.layout
    stages = range(layout.mesh.pp)
    of = [[cost for cost in found.ranks if cost.at["pp"] == stage] for stage in stages]

    def largest(value: Callable[[RankCost], int], unit: str = "") -> list[str]:
        return [scaled(max(map(value, costs)), unit) for costs in of]

    rows = [("", [f"stage {stage}" if layout.mesh.pp > 1 else "each rank" for stage in stages])]
    rows.append(("layers", [_layers(layout.chunks(stage)) for stage in stages]))
    rows.append(("weights held", [f"{costs[0].parameters:,}" for costs in of]))
    rows.append(("FLOPs a step", largest(lambda cost: cost.flops)))
    if layout.config.recompute != "none":
        rows.append(("  computed", largest(lambda cost: cost.hardware_flops)))
    rows.append(("memory", largest(lambda cost: cost.memory_bytes, "B")))
    held = [label for name, label in MEMORY.items() if any(getattr(cost, name) for cost in found.ranks)]
    for label in held:
        rows.append((f"  {label}", largest(lambda cost, label=label: cost.peak[label], "B")))
    for name, label in MEMORY.items():  # that are more at another moment
        if any(getattr(cost, name) > 1.01 * cost.peak[label] for cost in found.ranks):
            rows.append((f"  most {label}", largest(attrgetter(name), "B")))
    if any(cost.segment_bytes for cost in found.ranks):
        rows.append((SEGMENTS, largest(lambda cost: cost.segment_bytes, "B")))
    rows.append(("sent a step", largest(lambda cost: sum(cost.wire_bytes.values()), "B")))
    for use in dict.fromkeys(use for cost in found.ranks for use in cost.wire_bytes):
        rows.append((f"  {use}", largest(lambda cost, use=use: cost.wire_bytes.get(use, 0), "B")))
    return rows


def _layers(parts) -> str:
    return ", ".join(str(p.layers.start) if len(p.layers) == 1 else f"{p.layers.start}-{p.layers[-1]}" for p in parts)
