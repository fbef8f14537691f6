"""`minidist estimate`: the cost of a layout as a table with notes, or as JSON."""

import dataclasses
import json
import textwrap
from collections.abc import Callable
from operator import attrgetter

from minidist.config import Config
from minidist.tools.estimate import activations, flops, saved_tensors
from minidist.tools.estimate.estimate import MEMORY_KINDS, SHARED_MEMORY, Estimate, RankCost, estimate
from minidist.tools.estimate.flops import MeasuredStep
from minidist.tools.estimate.layout import Layout
from minidist.tools.estimate.table import format_si, print_table
from minidist.tools.simulate.command import timeline_json
from minidist.tools.simulate.draw import WIDTH
from minidist.validation import find_warnings

_COLUMNS = 6  # stages side by side in the table
_RECOMPUTED = {"none": "nothing", "block": "the forward of every layer", "selective": "core attention"}


def main(config: Config, ranks: int, t_comm: float, as_json: bool, measured: MeasuredStep | None = None) -> int:
    """Estimate and print; returns the exit code. Raises UserError for a run that `minidist train` would refuse."""
    found = estimate(config, ranks, t_comm=t_comm)
    if as_json:
        print(json.dumps(estimate_json(found, measured)))
    else:
        print_estimate(found, measured)
    return 0


def estimate_json(found: Estimate, measured: MeasuredStep | None = None) -> dict:
    """The whole estimate for `--json`: the model, the step, the pipeline and every rank."""
    layout, config = found.layout, found.layout.config
    seq_len, (model_flops, hardware_flops) = config.data.seq_len, flops.step_flops(layout)
    return {
        "world_size": layout.mesh.world_size,
        "mesh": layout.mesh.sizes,
        "dtype": layout.dtype,
        "parameters": config.model.num_parameters(),
        "tokens_per_step": config.train.global_batch * seq_len,
        "flops_per_token": config.model.flops_per_token(seq_len),
        "flops_per_step": model_flops,
        "hardware_flops_per_step": hardware_flops,
        **flops.utilisation_json(measured, model_flops, hardware_flops, layout.mesh.world_size),
        "pipeline": None if found.pipeline is None else timeline_json(found.pipeline),
        "stages": [
            [[chunk.layers.start, chunk.layers.stop] for chunk in layout.chunks(stage)]
            for stage in range(layout.mesh.pp)
        ],
        "layer_saved_tensors": _layer_saved_tensors(layout),
        "ranks": [_rank_json(cost) for cost in found.ranks],
        "notes": notes(found),
    }


def _rank_json(cost: RankCost) -> dict:
    totals = {"model_state_bytes": cost.model_state_bytes, "peak_memory_bytes": cost.peak_memory_bytes}
    return dataclasses.asdict(cost) | totals


def _layer_saved_tensors(layout: Layout) -> list[dict]:
    """The tensors that one layer saves for backward, for the largest micro-batch."""
    saved = saved_tensors.saved_by_layer(layout)
    tensors = activations.local_tensors(layout, saved, layout.largest_micro_batch)
    return [tensor._asdict() | {"bytes": tensor.bytes} for tensor in tensors]


def print_estimate(found: Estimate, measured: MeasuredStep | None = None) -> None:
    """Print what all ranks have in common, a table with a column per pipeline stage, and notes on the figures."""
    layout, config = found.layout, found.layout.config
    world, batch, seq_len = layout.mesh.world_size, config.train.global_batch, config.data.seq_len
    per_token, (model_flops, hardware_flops) = config.model.flops_per_token(seq_len), flops.step_flops(layout)
    ranks = f"{world} rank{'s' * (world > 1)}, {layout.mesh}"
    print(f"{ranks}; {config.model.num_parameters():,} {layout.dtype} parameters")
    count = config.train.micro_batches
    print(f"step: {batch} samples x {seq_len} tokens, {count} micro-batch{'es' * (count > 1)} per rank")
    recomputed = f"; {format_si(hardware_flops)} with recomputation" if hardware_flops > model_flops else ""
    print(f"FLOPs: {format_si(per_token)} per token, {format_si(model_flops)} per step{recomputed}")
    if measured is not None:
        print(flops.describe_utilisation(measured, model_flops, hardware_flops, world))
    if (pipeline := found.pipeline) is not None:
        live = " ".join(map(str, pipeline.peak_live))
        print(
            f"pipeline: {pipeline.schedule.kind}, bubble {pipeline.bubble:.4f}; "
            f"peak micro-batches in flight, by stage: {live}"
        )
    rows = _table_rows(found)
    for first in range(0, layout.mesh.pp, _COLUMNS):
        print()
        print_table([[name, *cells[first : first + _COLUMNS]] for name, cells in rows])
    print()
    for note in notes(found):
        print(textwrap.fill(note, WIDTH, subsequent_indent="  "))


def _table_rows(found: Estimate) -> list[tuple[str, list[str]]]:
    """The rows of the table: a name and one cell per stage, the largest of its ranks where they differ."""
    layout = found.layout
    stages = range(layout.mesh.pp)
    by_stage = [[cost for cost in found.ranks if cost.coords["pp"] == stage] for stage in stages]

    def largest(value: Callable[[RankCost], int], unit: str = "") -> list[str]:
        return [format_si(max(map(value, costs)), unit) for costs in by_stage]

    rows = [("", [f"stage {stage}" if layout.mesh.pp > 1 else "each rank" for stage in stages])]
    rows.append(("layers", [_format_layers(layout.chunks(stage)) for stage in stages]))
    rows.append(("local parameters", [f"{costs[0].local_parameters:,}" for costs in by_stage]))
    rows.append(("FLOPs per step", largest(lambda cost: cost.flops)))
    if layout.config.recompute != "none":
        rows.append(("  with recomputation", largest(lambda cost: cost.hardware_flops)))
    rows.append(("peak memory", largest(lambda cost: cost.peak_memory_bytes, "B")))
    for name, kind in MEMORY_KINDS.items():
        if any(getattr(cost, name) for cost in found.ranks):
            rows.append((f"  {kind}", largest(lambda cost, kind=kind: cost.peak_breakdown[kind], "B")))
    for name, kind in MEMORY_KINDS.items():
        if any(getattr(cost, name) > 1.01 * cost.peak_breakdown[kind] for cost in found.ranks):
            rows.append((f"  peak {kind}", largest(attrgetter(name), "B")))
    if any(cost.shared_segment_bytes for cost in found.ranks):
        rows.append((SHARED_MEMORY, largest(lambda cost: cost.shared_segment_bytes, "B")))
    rows.append(("sent per step", largest(lambda cost: sum(cost.wire_bytes.values()), "B")))
    for spec in dict.fromkeys(spec for cost in found.ranks for spec in cost.wire_bytes):
        rows.append((f"  {spec}", largest(lambda cost, spec=spec: cost.wire_bytes.get(spec, 0), "B")))
    return rows


def _format_layers(chunks) -> str:
    return ", ".join(str(c.layers.start) if len(c.layers) == 1 else f"{c.layers.start}-{c.layers[-1]}" for c in chunks)


def notes(found: Estimate) -> list[str]:
    """What the figures mean and what they leave out, a sentence or two each."""
    layout = found.layout
    config = layout.config
    lines = [
        "k, M and G are powers of 1000. Each column shows the largest value of its ranks, which may differ a little.",
        "peak memory: of all tensors together; the indented lines are its breakdown at that time. `peak X` is the peak "
        "of X by itself, where it is higher at another time of the step. Not included: Python and torch (about 0.2 GB "
        "per process), the kernels' own workspaces, and evaluation.",
        "activations: what torch's CPU kernels save for backward; GPU kernels may save other tensors. buffers: "
        "gradients of activations, messages, copies, and ZeRO's gathered parameters and unreduced gradients. Measure "
        "them with minidist train --memory FILE.",
        "FLOPs: the model's forward and backward, with attention counted in full; MFU uses them. HFU adds what "
        f"backward recomputes: {_RECOMPUTED[config.recompute]}.",
    ]
    lines += find_warnings(config, layout.mesh)
    if any(cost.shared_segment_bytes for cost in found.ranks):
        lines.append(
            "shared memory: this rank's part of the segments through which ranks of one machine communicate (backend "
            "shm), in addition to the tensors; 0 with gloo and nccl."
        )
    if config.recompute == "selective":
        lines.append(_note_on_selective(layout))
    if config.compile:
        lines.append(
            "compile: the compiler decides what a compiled layer saves; the activations are those of eager mode."
        )
    if layout.mesh.cp > 1:
        lines.append(
            "Causal ring attention, and the fused kernel under Ulysses, skip half of attention's FLOPs; the other half "
            "is balanced over the ranks."
        )
    if layout.mesh.tp > config.model.num_kv_heads:
        lines.append(
            f"{config.model.num_kv_heads} key-value heads over tp={layout.mesh.tp}: several ranks replicate, and "
            "compute, the same head; FLOPs count it once."
        )
    if found.pipeline is not None:
        lines.append(
            "bubble: assumes that each action takes as long as its FLOPs, with input and weight gradients each as long "
            "as forward's products; minidist simulate takes measured times."
        )
    return lines


def _note_on_selective(layout: Layout) -> str:
    """The effect of selective recomputation in this run: next to nothing with a fused kernel."""
    samples = layout.largest_micro_batch
    full = activations.local_bytes(layout, saved_tensors.saved_without_recompute(layout), samples)
    left = activations.local_bytes(layout, saved_tensors.saved_by_layer(layout), samples)
    saving = f"recompute selective: a layer saves {full - left:,} bytes less of {full:,}"
    if layout.mesh.cp > 1 and layout.config.parallel.context == "ulysses":
        return f"{saving}, the heads that it received from other ranks; they are exchanged again in backward."
    return (
        f"{saving}. It has no effect: the fused kernel saves no scores, only one number per query and head, and core "
        "attention is computed twice for that. --recompute block saves memory."
    )
