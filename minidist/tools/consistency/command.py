"""`minidist consistency`: trains one model in every synchronization mode, and prints, draws and writes what each costs.

`comparison_options` checks the options, `comparison` measures a mode, `comparison_picture` draws.
"""

import json
import statistics
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minidist.config import Config
from minidist.errors import format_count
from minidist.tools.consistency.comparison_options import ConsistencyOptions, plan_modes

if TYPE_CHECKING:
    from minidist.tools.consistency.comparison import Measurement

WIDTH = 110


def main(options: ConsistencyOptions) -> int:
    """Measure the modes that the options select; print a line for each mode as it ends, then notes; return 0.

    Raises UserError for invalid options, before anything runs.
    """
    modes, compute_s = plan_modes(options)
    from minidist.tools.consistency.clock import Durations
    from minidist.tools.consistency.comparison import PRELOAD, measure_mode
    from minidist.tools.launch import RankServer

    print(*_describe_comparison(options, modes[0].config), "", *format_header(), sep="\n", flush=True)
    durations = Durations(compute_s, [0.0] * options.ranks, spread=options.spread, seed=options.run.train.seed)
    measurements: list[Measurement] = []
    with RankServer(preload=PRELOAD) as server, tempfile.TemporaryDirectory(prefix="minidist-consistency-") as folder:
        for mode in modes:
            bytes_per_s = options.link_mbit * 1e6 / 8
            found = measure_mode(mode, durations, bytes_per_s, options.seeds, server, Path(folder))
            measurements.append(found)
            print(format_row(found, measurements[0]), flush=True)
            if options.json is not None:
                options.json.write_text(format_json(options, measurements))
    print("", *_format_notes(), sep="\n")
    if options.plot is not None:
        from minidist.tools.consistency.comparison_picture import draw_comparison

        draw_comparison(measurements).savefig(options.plot)
    return 0


def half_range(values: Sequence[float]) -> float:
    """Return half the difference between the largest and the smallest of the values."""
    return (max(values) - min(values)) / 2


def format_header() -> list[str]:
    """Return the two header lines of the table whose rows `format_row` formats."""
    return [
        _format_columns("", "held-out loss", "to first", "sent per", "virtual clock", "live ranks", "", ""),
        _format_columns("mode", "mean, spread", "row", "rank", "run, waiting", "step, waiting", "drift", "staleness"),
    ]


def format_row(found: "Measurement", first: "Measurement") -> str:
    """Return the line of the table for one mode. first: the measurement that the loss is compared with."""
    from minidist.tools.consistency.clock import COMPUTING, MESSAGE
    from minidist.tools.consistency.comparison import end_of_phases, mean_seconds_in_phase

    losses = found.held_out_losses
    end_s = end_of_phases(found.phases)
    idle = max(
        0.0, 1 - (mean_seconds_in_phase(found.phases, COMPUTING) + mean_seconds_in_phase(found.phases, MESSAGE)) / end_s
    )
    live = f"{1e3 * found.step_s:.1f} ms {found.waited_s / found.step_s:4.0%}"
    mean = statistics.mean(losses)
    change = mean / statistics.mean(first.held_out_losses) - 1
    drifts = [drift for of_seed in found.drifts for drift in of_seed]
    stale = "-"
    if found.staleness:
        mean_staleness = sum(k * n for k, n in found.staleness.items()) / found.staleness.total()
        stale = f"{mean_staleness:.1f}, max {max(found.staleness)}"
    return _format_columns(
        found.mode.name,
        f"{mean:.4f} {half_range(losses):.4f}",
        "" if found is first else f"{change:+.2%}",
        _format_bytes(max(found.sent_bytes)),
        f"{end_s:.1f} s {idle:4.0%}",
        live,
        f"{statistics.mean(drifts):.3g}" if drifts else "-",
        stale,
    )


def _format_columns(name: str, *cells: str) -> str:
    """Return a line of the table. name: of the mode. cells: one text per column."""
    widths = (16, 10, 10, 15, 15, 10, 13)
    return (f"{name:<18}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))).rstrip()


def _format_bytes(count: float) -> str:
    """Return a number of bytes as text with a decimal unit, such as "1.50 MB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B"


def _describe_comparison(options: ConsistencyOptions, config: Config) -> list[str]:
    """Return the lines that say what is compared: ranks, model, text, steps, and the simulated times."""
    train, data = config.train, config.data
    text = data.path or data.source
    slow = f", slow {' '.join(options.slow)}" if options.slow else ""
    return [
        f"{format_count(options.ranks, 'rank')}, {config.model.num_parameters():,} parameters, {text}: "
        f"{format_count(train.steps, 'step')} of "
        f"{train.global_batch} x {data.seq_len} tokens, seeds {train.seed} to "
        f"{train.seed + options.seeds - 1}",
        f"virtual clock: a step computes for {options.step_s:g} s{slow}; links of {options.link_mbit:g} Mbit/s",
    ]


def _format_notes() -> list[str]:
    """Return the notes that explain the columns of the table, wrapped to its width."""
    notes = (
        "held-out loss in nats per token; its spread is half the range over the seeds.",
        "sent per rank: by the busiest rank, in all steps. Counted on live ranks; modelled for asynchronous and stale, "
        "and for the algorithm inside the backend's collectives.",
        "waiting: for other ranks or for a busy link, until the last rank ends, mean over the ranks; on live ranks "
        "in waits of collectives, transfers included.",
        "drift: root mean square distance of the replicas from their mean, after h - 1 local steps or between the "
        "parameters that workers compute with; mean over rounds and seeds.",
    )
    return [line for note in notes for line in textwrap.wrap(note, WIDTH, subsequent_indent="  ")]


def format_json(options: ConsistencyOptions, measurements: "Sequence[Measurement]") -> str:
    """Return the comparison as a JSON document. Bytes are by rank, times in seconds."""
    document = {
        "ranks": options.ranks,
        "seeds": options.seeds,
        "slow": list(options.slow),
        "step_s": options.step_s,
        "spread": options.spread,
        "link_mbit": options.link_mbit,
        "modes": [measurement_json(found) for found in measurements],
    }
    return json.dumps(document, indent=1) + "\n"


def measurement_json(found: "Measurement") -> dict:
    """Return one mode's entry of the JSON document."""
    from minidist.tools.consistency.clock import COMPUTING, LINK_BUSY, MESSAGE, WAITING
    from minidist.tools.consistency.comparison import end_of_phases, mean_seconds_in_phase

    kinds = {"computing_s": COMPUTING, "message_s": MESSAGE, "waiting_s": WAITING, "link_busy_s": LINK_BUSY}
    config = found.mode.config
    return {
        "name": found.mode.name,
        "h": config.consistency.h if config.consistency.merges_replicas else None,
        "exchange": config.consistency.exchange if config.consistency.mode == "diloco" else None,
        "bound": found.mode.bound,
        "steps": config.train.steps,
        "held_out_losses": found.held_out_losses,
        "sent_bytes": found.sent_bytes,
        "sent_bytes_are": "modelled" if found.mode.on_virtual_clock else "counted",
        "expected_bytes": found.expected_bytes,
        "virtual": {"run_s": end_of_phases(found.phases)}
        | {name: mean_seconds_in_phase(found.phases, kind) for name, kind in kinds.items()},
        "live": {"step_s": found.step_s, "waited_s": found.waited_s},
        "drifts": found.drifts,
        "staleness": {str(k): found.staleness[k] for k in sorted(found.staleness)},
    }
