"""`minidist estimate`: the cost of a layout as a table with notes, or as JSON."""

import dataclasses
import json
import textwrap
from collections.abc import Callable
from operator import attrgetter

from minidist.config import Config
from minidist.tools.config_warnings import find_warnings
from minidist.tools.estimate import activations, flops, saved_tensors
from minidist.tools.estimate.estimate import CHECKPOINT_COPY, MEMORY_KINDS, SHARED_MEMORY, Estimate, RankCost, estimate
from minidist.tools.estimate.failures import checkpoint_intervals_json, print_checkpoint_intervals
from minidist.tools.estimate.flops import MeasuredStep
from minidist.tools.estimate.goodput import FailureModel
from minidist.tools.estimate.layout import RunLayout
from minidist.tools.estimate.parameter_count import OFFLOAD_NOTE
from minidist.tools.estimate.table import format_si, print_table
from minidist.tools.simulate.command import timeline_json
from minidist.tools.simulate.draw import WIDTH

_COLUMNS = 6  # stages side by side in the table
_RECOMPUTED = {"none": "none", "block": "the forward of every layer", "selective": "core attention"}


def main(
    config: Config,
    ranks: int,
    t_comm: float,
    as_json: bool,
    measured: MeasuredStep | None = None,
    failures: FailureModel | None = None,
) -> int:
    """Estimate a training step, print the result as a table or (`as_json`) as JSON, and return exit code 0.

    t_comm: time of a transfer between pipeline stages, as a multiple of the forward of the costliest model chunk.
    measured: if given, also print MFU and HFU. failures: if given, also print the best time between saves. Raises
    UserError for a run that `minidist train` would refuse.
    """
    result = estimate(config, ranks, t_comm=t_comm)
    if as_json:
        print(json.dumps(_estimate_json(result, measured) | checkpoint_intervals_json(failures)))
    else:
        _print_estimate(result, measured)
        print_checkpoint_intervals(failures)
    return 0


def _estimate_json(result: Estimate, measured: MeasuredStep | None = None) -> dict:
    """Return the document that `--json` prints: the model, the step, the pipeline and every rank.

    measured: a measured step, from which MFU and HFU are computed; both are None without one.
    """
    layout, config = result.layout, result.layout.config
    seq_len, (model_flops, hardware_flops) = config.data.seq_len, flops.step_flops(layout)
    return {
        "world_size": layout.mesh.world_size,
        "mesh": layout.mesh.sizes,
        "dtype": layout.dtype,
        "parameters": config.model.num_parameters(),
        "tokens_per_step": config.train.global_batch * seq_len,
        "flops_per_token": flops.flops_per_token(config.model, seq_len),
        "flops_per_step": model_flops,
        "hardware_flops_per_step": hardware_flops,
        **flops.utilisation_json(measured, model_flops, hardware_flops, layout.mesh.world_size),
        "pipeline": None if result.pipeline is None else timeline_json(result.pipeline),
        "stages": [
            [[chunk.layers.start, chunk.layers.stop] for chunk in layout.stage_chunks(stage)]
            for stage in range(layout.mesh.pp)
        ],
        "layer_saved_tensors": _layer_saved_tensors(layout),
        "ranks": [_rank_json(cost) for cost in result.ranks],
        "notes": _list_estimate_notes(result),
    }


def _rank_json(cost: RankCost) -> dict:
    """Return the entry of one rank: all fields of its cost, and their totals."""
    totals = {"model_state_bytes": cost.model_state_bytes, "peak_memory_bytes": cost.peak_memory_bytes}
    return dataclasses.asdict(cost) | totals


def _layer_saved_tensors(layout: RunLayout) -> list[dict]:
    """Return the tensors that one layer saves for backward, for the largest micro-batch, as JSON objects."""
    saved = saved_tensors.saved_by_layer(layout)
    tensors = activations.list_local_tensors(layout, saved, layout.largest_micro_batch_size)
    return [tensor._asdict() | {"bytes": tensor.bytes} for tensor in tensors]


def _print_estimate(result: Estimate, measured: MeasuredStep | None = None) -> None:
    """Print the figures of the whole run, a table with a column per pipeline stage, and notes on the figures.

    measured: if given, also print MFU and HFU.
    """
    layout, config = result.layout, result.layout.config
    world, batch, seq_len = layout.mesh.world_size, config.train.global_batch, config.data.seq_len
    per_token, (model_flops, hardware_flops) = flops.flops_per_token(config.model, seq_len), flops.step_flops(layout)
    ranks = f"{world} rank{'s' * (world > 1)}, {layout.mesh}"
    print(f"{ranks}; {config.model.num_parameters():,} {layout.dtype} parameters")
    count = config.train.micro_batches
    print(f"step: {batch} samples x {seq_len} tokens, {count} micro-batch{'es' * (count > 1)} per rank")
    recomputed = f"; {format_si(hardware_flops)} with recomputation" if hardware_flops > model_flops else ""
    print(f"FLOPs: {format_si(per_token)} per token, {format_si(model_flops)} per step{recomputed}")
    if measured is not None:
        print(flops.describe_utilisation(measured, model_flops, hardware_flops, world))
    if (pipeline := result.pipeline) is not None:
        live = " ".join(map(str, pipeline.peak_live_micro_batches))
        print(
            f"pipeline: {pipeline.schedule.kind}, bubble {pipeline.bubble:.4f}; "
            f"peak micro-batches in flight, by stage: {live}"
        )
    rows = _table_rows(result)
    for first in range(0, layout.mesh.pp, _COLUMNS):
        print()
        print_table([[name, *cells[first : first + _COLUMNS]] for name, cells in rows])
    print()
    for note in _list_estimate_notes(result):
        print(textwrap.fill(note, WIDTH, subsequent_indent="  "))


def _table_rows(result: Estimate) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: a name, and one cell per stage for the largest value of its ranks."""
    layout = result.layout
    stages = range(layout.mesh.pp)
    by_stage = [[cost for cost in result.ranks if cost.coords["pp"] == stage] for stage in stages]

    def largest(value: Callable[[RankCost], int], unit: str = "") -> list[str]:
        return [format_si(max(map(value, costs)), unit) for costs in by_stage]

    rows = [("", [f"stage {stage}" if layout.mesh.pp > 1 else "each rank" for stage in stages])]
    rows.append(("layers", [_format_layers(layout.stage_chunks(stage)) for stage in stages]))
    rows.append(("local parameters", [f"{costs[0].local_parameters:,}" for costs in by_stage]))
    rows.append(("FLOPs per step", largest(lambda cost: cost.flops)))
    if layout.config.recompute != "none":
        rows.append(("  with recomputation", largest(lambda cost: cost.hardware_flops)))
    rows.append(("peak memory", largest(lambda cost: cost.peak_memory_bytes, "B")))
    for name, kind in MEMORY_KINDS.items():
        if any(getattr(cost, name) for cost in result.ranks):
            rows.append((f"  {kind}", largest(lambda cost, kind=kind: cost.peak_breakdown[kind], "B")))
    for name, kind in MEMORY_KINDS.items():
        if any(getattr(cost, name) > 1.01 * cost.peak_breakdown[kind] for cost in result.ranks):
            rows.append((f"  peak {kind}", largest(attrgetter(name), "B")))
    if any(cost.shared_segment_bytes for cost in result.ranks):
        rows.append((SHARED_MEMORY, largest(lambda cost: cost.shared_segment_bytes, "B")))
    if any(cost.checkpoint_copy_bytes for cost in result.ranks):
        rows.append((CHECKPOINT_COPY, largest(lambda cost: cost.checkpoint_copy_bytes, "B")))
    rows.append(("sent per step", largest(lambda cost: sum(cost.wire_bytes.values()), "B")))
    for spec in dict.fromkeys(spec for cost in result.ranks for spec in cost.wire_bytes):
        rows.append((f"  {spec}", largest(lambda cost, spec=spec: cost.wire_bytes.get(spec, 0), "B")))
    if any(cost.replica_merge_bytes for cost in result.ranks):
        h = layout.config.consistency.h
        rows.append(
            (
                f"and per {h} steps" if h > 1 else "and for merging",
                largest(lambda c: sum(c.replica_merge_bytes.values()), "B"),
            )
        )
    return rows


def _format_layers(chunks) -> str:
    """Return the layer numbers of chunks as text, such as "0-3, 8-11"."""
    return ", ".join(str(c.layers.start) if len(c.layers) == 1 else f"{c.layers.start}-{c.layers[-1]}" for c in chunks)


def _list_estimate_notes(result: Estimate) -> list[str]:
    """Return notes that explain the figures and what they leave out, a sentence or two each."""
    layout = result.layout
    config = layout.config
    lines = [
        "k, M and G are powers of 1000. Each column shows the largest value of its ranks, which may differ slightly.",
        "peak memory: of all tensors together; the indented lines are its breakdown at that time. `peak X` is the own "
        "peak of X, where that is higher at another time of the step. Not included: Python and torch (about 0.2 GB "
        "per process), the kernels' own workspaces, and evaluation.",
        "activations: the tensors that torch's CPU kernels save for backward; GPU kernels may save others. buffers: "
        "gradients of activations, messages, copies, and ZeRO's gathered parameters and unreduced gradients. minidist "
        "train --memory FILE measures both.",
        "FLOPs: of the model's forward and backward, with attention counted without its causal mask; MFU uses them. "
        f"HFU adds recomputation: {_RECOMPUTED[config.recompute]}.",
    ]
    lines += find_warnings(config, layout.mesh)
    if config.zero.offload:
        lines.append(OFFLOAD_NOTE)
    if any(cost.shared_segment_bytes for cost in result.ranks):
        lines.append(
            "shared memory: a rank's part of the segments through which the ranks of one machine communicate (backend "
            "shm), in addition to peak memory; 0 with gloo and nccl."
        )
    if any(cost.checkpoint_copy_bytes for cost in result.ranks):
        lines.append(
            f"{CHECKPOINT_COPY}: host memory for saves in the background, allocated at the first save, in addition to "
            "peak memory; 0 with --checkpoint.no-background."
        )
    if config.consistency.mode == "diloco":
        errors = ", and what int8 numbers have left out" * config.consistency.quantizes
        lines.append(f"diloco: the states contain the parameters at the last merge, and the outer momentum{errors}.")
    if config.consistency.mode == "central":
        lines.append("central: the memory is that of the server; the other ranks have no optimizer states.")
    if config.consistency.is_asynchronous:
        lines.append(
            f"{config.consistency.mode}: peak memory leaves out the server's second copy of the parameters and its "
            "message buffers, one per worker; the other ranks have no optimizer states."
        )
    if config.recompute == "selective":
        lines.append(_note_on_selective(layout))
    if config.compile:
        lines.append(
            "compile: the compiler decides which tensors a compiled layer saves; the estimate is that of eager mode."
        )
    if layout.mesh.cp > 1:
        lines.append(
            "Causal ring attention, and the fused kernel under Ulysses, skip half of the attention FLOPs; the rest is "
            "balanced over the ranks."
        )
    if layout.mesh.tp > config.model.num_kv_heads:
        lines.append(
            f"{config.model.num_kv_heads} key-value heads over tp={layout.mesh.tp}: several ranks replicate and "
            "compute the same head; FLOPs count it once."
        )
    if result.pipeline is not None:
        lines.append(
            "bubble: assumes that the time of a forward or backward is proportional to its FLOPs; minidist simulate "
            "takes measured times."
        )
    return lines


def _note_on_selective(layout: RunLayout) -> str:
    """Return a note on selective recomputation in this run: it saves almost nothing with a fused kernel."""
    samples = layout.largest_micro_batch_size
    full = activations.local_tensor_bytes(layout, saved_tensors.saved_by_layer_without_recompute(layout), samples)
    selective = activations.local_tensor_bytes(layout, saved_tensors.saved_by_layer(layout), samples)
    saving = f"recompute selective: a layer saves {selective:,} bytes instead of {full:,}"
    if layout.mesh.cp > 1 and layout.config.parallel.context == "ulysses":
        return f"{saving}: without the exchanged heads, which backward exchanges again."
    return (
        f"{saving}. The fused kernel saves no scores, only one number per query and head, so recomputing core "
        "attention costs time and frees almost nothing. --recompute block frees memory."
    )
