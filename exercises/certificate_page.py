"""The certificate as one HTML page: no external resources, readable in light and dark, one A4 page when printed.

Every figure on the page is a number of the certificate's JSON file; `<data value="...">` has it unrounded.
"""

import html
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_STYLE = Path(__file__).with_name("certificate.css").read_text()
# Figures of both engines: title, key, unit, and the fast engine's code that makes it smaller, if it is, on a mesh with
# several ranks along an axis: the axis, and the code.
_FIGURES = (
    ("held-out loss, nats per token", "held_out_loss", "nats", "", ""),
    (
        "operations in a step, most of a rank", "operations", "count", "tp",
        "minidist/process_groups.py: gradients of norms, which are partial sums of the tensor-parallel ranks, are "
        "summed once per step; the simple trainer sums them in every micro-batch.",
    ),
    ("bytes sent in a step: P2P", "counted_bytes_per_step", "bytes", "pp", "minidist/parallel/pipeline/transfers.py"),
    (
        "bytes sent in a step: collectives", "modelled_bytes_per_step", "bytes", "pp",
        "minidist/process_groups.py: one group sums the tied embedding's gradient over stages and replicas; the simple "
        "trainer sums it over both in turn.",
    ),
    (
        "peak memory of a rank's tensors", "peak_memory", "bytes", "tp",
        "minidist/parallel/tensor/vocabulary.py: the loss overwrites its logits; in the simple trainer autograd keeps "
        "several tensors of this size.",
    ),
    (
        "time of a step, median", "step_s", "seconds", "pp",
        "minidist/parallel/pipeline/transfers.py: receives are posted before they are needed; "
        "minidist/train/engine.py: one call computes all norms.",
    ),
    (
        "time of a step, fastest", "fastest_step_s", "seconds", "pp",
        "minidist/parallel/pipeline/transfers.py and minidist/train/engine.py, in the step that waits least.",
    ),
)  # fmt: skip
COMPARED = tuple(key for _, key, *_ in _FIGURES)
# Figures whose ratio differs from 1 by less count as equal; times vary from run to run.
_EQUAL, _EQUAL_TIMES = 5e-4, 0.05


def render_page(certificate: dict[str, Any], json_name: str) -> str:
    """Return the page of a certificate. json_name: the file with all of its numbers."""
    training = certificate["training"]
    has_trained = training is not None and "failure" not in training
    body = [
        _render_header(certificate),
        _render_layouts(certificate),
        _render_repair(certificate),
        _render_training(certificate) if has_trained else "<h2>Training</h2><p class=bad>There is no training run.</p>",
        _render_functions(certificate),
        _render_footer(certificate, json_name),
    ]
    title = "Certificate of a hybrid-parallel trainer"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>',
            *body,
            "</body></html>\n",
        ]
    )


def number(value: float, kind: str = "count") -> str:
    """Return a number of the certificate as HTML, rounded for reading. kind: its unit, or how it is written."""
    return f'<data value="{value!r}">{_FORMATS[kind](value)}</data>'


def _format_bytes(value: float) -> str:
    """Return bytes as text, in units of 10**3 or 10**6."""
    return f"{value / 1e6:.3f} MB" if value >= 1e5 else f"{value / 1e3:.1f} kB"


def _format_difference(value: float) -> str:
    """Return a relative difference as text."""
    return "non-finite" if value >= sys.float_info.max else f"{value:.1e}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "count": lambda value: f"{value:,}",
    "nats": lambda value: f"{value:.4f}",
    "seconds": lambda value: f"{value * 1e3:.0f} ms",
    "bytes": _format_bytes,
    "difference": _format_difference,
}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Return a table; the cells are HTML. kind: its class."""
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return f'<table class="{kind}">\n' + "\n".join(lines) + "\n</table>"


def _label(certificate: dict[str, Any], key: str) -> str:
    """Return how a kind of figure was had, as HTML."""
    return f"<i>{certificate['labels'][key]}</i>"


def _render_header(certificate: dict[str, Any]) -> str:
    """Return title, verdict and the reasons against it."""
    verdict = certificate["verdict"]
    word, color = ("passed", "good") if verdict["passed"] else ("not passed", "bad")
    reasons = "".join(f'<p class="bad">{html.escape(reason)}</p>' for reason in verdict["reasons"])
    mine, all_of = number(certificate["num_functions"]), number(certificate["num_functions_of_course"])
    return (
        f"<header><div><h1>A hybrid-parallel trainer, written by hand</h1><p>{mine} of {all_of} functions of the "
        f"trainer are the learner's own, installed in the simple trainer of minidist on every rank.</p></div>"
        f'<div class="verdict {color}">{word}</div></header>{reasons}'
    )


def _render_layouts(certificate: dict[str, Any]) -> str:
    """Return the table of the layouts that were compared with one process."""
    rows = []
    for layout in certificate["layouts"]:
        differences = [layout["differences"].get(kind) for kind in ("loss", "grad", "grad_norm", "param")]
        cells = ["-" if value is None else number(value, "difference") for value in differences]
        verdict = '<b class="good">equal</b>' if layout["ok"] else '<b class="bad">differs</b>'
        name = (
            f"<b>{html.escape(layout['name'])}</b> <span class=muted>{html.escape(_shorten(layout['layout']))}</span>"
        )
        rows.append([name, number(layout["ranks"]), layout["dtype"], *cells, verdict])
    heads = ("layout", "ranks", "dtype", "loss", "gradients", "gradient norm", "parameters", "")
    how = _label(certificate, "differences")
    return (
        f"<section><h2>Layouts compared with one process: largest relative differences {how}</h2>{_table(heads, rows)}"
        "<p class=muted>Every gradient before the optimizer, loss and gradient norm of every step, every parameter at "
        "the end, on every rank; ranks start with different values and have different numbers of samples. 16-bit rows "
        "are compared with float32. A dash: replicas that train separately have gradients of their own.</p></section>"
    )


def _shorten(layout: str) -> str:
    """Return a layout's description without the words that all of them have."""
    common = ("tied", "padding", "different-start", "uneven-shares")
    return " ".join(word for word in layout.split() if word not in common)


def _render_repair(certificate: dict[str, Any]) -> str:
    """Return a line about the live repair of a flipped bit."""
    repair = certificate["repair"]
    where = f"{number(repair['ranks'])} ranks, <code>{html.escape(repair['fault'])}</code>"
    if not repair["ok"]:
        return f"<p><b>Live repair</b>, {where}: <b class=bad>failed</b>: {html.escape(repair['reason'])}</p>"
    losses = number(len(repair["losses"]))
    return (
        f"<p><b>Live repair</b>, {where}: {html.escape(repair['note'])} All {losses} losses equal those of the "
        f"undisturbed run, bit by bit <i>{repair['how']}</i>.</p>"
    )


def _render_training(certificate: dict[str, Any]) -> str:
    """Return the comparison of both engines, and the figures of each rank."""
    training = certificate["training"]
    yours, fast, rows = training["yours"], training["fast"], []
    axes = {axis for rank in yours["ranks"] for axis, index in rank["coords"].items() if index}
    for title, key, kind, axis, where in _FIGURES:
        mine, other = (training["comparison"][key][name] for name in ("yours", "fast"))
        ratio, color, where = _compare(mine, other, kind, where if axis in axes else "smaller in this run")
        how, why = _label(certificate, key), f'<div class="text muted">{html.escape(where)}</div>'
        cells = (number(mine, kind), number(other, kind), f'<span class="{color}">{ratio}</span>', why)
        rows.append([f"{title} {how}", *cells])
    heads = (
        "figure",
        "yours",
        "fast engine",
        "fast / yours",
        "the fast engine's code that does better",
    )
    steps, count = number(training["steps"]), number(training["ranks"])
    difference = number(training["largest_loss_difference"], "difference")
    by_rank = [
        [number(rank["rank"]), _format_coords(rank["coords"])]
        + [number(rank[key], kind) for _, key, kind in _RANK_COLUMNS]
        + [number(other["peak_memory"], "bytes")]
        for rank, other in zip(yours["ranks"], fast["ranks"], strict=True)
    ]
    heads_of_rank = [f"{title}<br>{_label(certificate, key)}" for title, key, _ in _RANK_COLUMNS]
    rank_heads = ("rank", "coordinates", *heads_of_rank, f"fast: peak<br>{_label(certificate, 'peak_memory')}")
    unigram, bigram = number(yours["unigram_loss"], "nats"), number(yours["bigram_loss"], "nats")
    return (
        f"<section><h2>The same run under torchrun, twice: {steps} steps on {count} ranks over {yours['backend']}</h2>"
        f"{_table(heads, rows, 'figures')}<p>Largest relative difference between the two losses of any step: "
        f"{difference} {_label(certificate, 'largest_loss_difference')}. Held-out loss of a unigram model {unigram}, "
        f"of a bigram model {bigram} {_label(certificate, 'unigram_loss')}.</p></section><section><div class=two><div>"
        f"<h2>Each rank, with your functions, in one step</h2>{_table(rank_heads, by_rank)}</div>"
        f"<div><h2>Loss of each step, with your functions {_label(certificate, 'losses')}</h2>"
        f"{_draw_losses(yours['losses'], yours['unigram_loss'])}</div></div></section>"
    )


def _compare(mine: float, other: float, kind: str, where: str) -> tuple[str, str, str]:
    """Return the ratio of the fast engine's figure to the simple trainer's, its color, and what to say about it.

    kind: the unit. where: the code that makes the fast engine's figure smaller.
    """
    ratio = f"{other / mine:.3f}" if mine else "-"
    equal = _EQUAL_TIMES if kind == "seconds" else _EQUAL
    if abs(other - mine) <= equal * abs(mine):
        return ratio, "muted", f"equal within {equal:.0%} in this run" if kind == "seconds" else "equal in this run"
    return (ratio, "good", where) if other < mine else (ratio, "muted", "not better in this run")


_RANK_COLUMNS = (
    ("P2P sent", "counted_bytes_per_step", "bytes"),
    ("collectives", "modelled_bytes_per_step", "bytes"),
    ("operations", "operations", "count"),
    ("peak memory", "peak_memory", "bytes"),
)


def _format_coords(coords: dict[str, int]) -> str:
    """Return a rank's coordinates on the mesh as HTML."""
    text = " ".join(f"{axis} {index}" for axis, index in coords.items() if axis != "cp")
    return f'<span class="coords">{text}</span>'


def _draw_losses(losses: Sequence[float], unigram: float) -> str:
    """Return an SVG curve of the losses, with the unigram model's loss as a line."""
    width, height, left = 300, 118, 24
    low, high = min(*losses, unigram), max(losses)
    span = max(high - low, 1e-9)

    def y_of(loss: float) -> float:
        return 6 + (high - loss) / span * (height - 22)

    step = (width - left - 6) / max(1, len(losses) - 1)
    points = " ".join(f"{left + index * step:.1f},{y_of(loss):.1f}" for index, loss in enumerate(losses))
    ticks = "".join(f'<text x="0" y="{y_of(loss) + 3:.1f}">{loss:.2f}</text>' for loss in (high, low))
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="loss by step">{ticks}'
        f'<line x1="{left}" x2="{width - 6}" y1="{y_of(unigram):.1f}" y2="{y_of(unigram):.1f}" '
        'class="rule"/>'
        f'<text x="{width - 62}" y="{y_of(unigram) - 3:.1f}">unigram {unigram:.2f}</text>'
        f'<polyline points="{points}" class="curve"/>'
        f'<text x="{left}" y="{height - 3}">step 1</text>'
        f'<text x="{width - 34}" y="{height - 3}">step {len(losses)}</text></svg>'
    )


def _render_functions(certificate: dict[str, Any]) -> str:
    """Return the list of the learner's functions, each with its calls on all ranks together."""
    lines = []
    for function in certificate["functions"]:
        parts = [
            number(function["training_calls"]) if function["training_calls"] else "-",
            number(function["proof_calls"]),
        ]
        lines.append(f"<li><span>{html.escape(function['exercise'])}</span><span>{' / '.join(parts)}</span></li>")
    left_out = ", ".join(line.split()[0] for line in certificate["left_out"])
    more = (
        f"<p class=muted>Left out, for the reasons in the JSON file: {html.escape(left_out)}.</p>" if left_out else ""
    )
    return (
        f"<section><h2>The learner's functions: calls on all ranks, in training / in the layouts and the repair "
        f'{_label(certificate, "calls")}</h2><ul class="functions">{"".join(lines)}</ul>{more}</section>'
    )


def _render_footer(certificate: dict[str, Any], json_name: str) -> str:
    """Return date, versions and machine, and what the labels mean."""
    versions = ", ".join(f"{name} {html.escape(version)}" for name, version in certificate["versions"].items())
    cores = number(certificate["machine"]["cores"])
    return (
        f"<footer><p>{html.escape(certificate['date'])} · {versions} · {html.escape(certificate['machine']['system'])}"
        f", {cores} usable cores {_label(certificate, 'cores')} · calls per rank and all numbers unrounded: "
        f"{html.escape(json_name)}</p><p><b>observed</b>: seen in a run or reported by the system; <b>counted</b>: by "
        "the meter or a counter in the code; <b>modelled</b>: bytes of a collective, by the ring algorithm, since the "
        "backend does not report its own; <b>computed</b>: from the other figures or the text.</p></footer>"
    )
