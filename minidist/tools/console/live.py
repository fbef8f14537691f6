"""The live view of a run on a terminal: progress, numbers, held-out loss, and a line per rank."""

import math

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from minidist.fault.signals import StopSignalRecorder
from minidist.tools.console.lines import (
    MB,
    PlainView,
    describe_models,
    format_final_losses,
    format_grad_norm,
    format_loss,
)
from minidist.train.step_result import StepResult

_LANE_WIDTH = 24
_SPARKS = "▁▂▃▄▅▆▇█"


class _StopLine:
    """The last line of the view: how to stop the run, or that it is stopping. Each refresh evaluates it again."""

    def __init__(self, stop: StopSignalRecorder | None):
        self._stop = stop

    def __rich__(self) -> Text:
        requested = None if self._stop is None else self._stop.signal_name
        if requested is None:
            return Text("Ctrl-C: save and stop; twice: stop at once", style="dim")
        again = "; Ctrl-C stops the run at once" if requested == "SIGINT" else ""
        return Text(f"{requested}: saving after this step{again}", style="bold")


class LiveView(PlainView):
    """Displays the progress of a run on a terminal: metrics are redrawn in place, notes scroll above them.

    header: lines that describe the run, printed first. steps: the number of steps of the run. start: the number of
    steps already done when a run resumes. console: rich's console; None for standard output. stop: tells whether a
    signal has asked the run to stop.
    """

    def __init__(
        self,
        header: list[str],
        steps: int,
        start: int = 0,
        console: Console | None = None,
        stop: StopSignalRecorder | None = None,
    ):
        self._stop = _StopLine(stop)
        self.console = console or Console()
        for line in header:
            self.print_note(line)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("train", total=steps, completed=start)
        self._over = False
        self._losses: list[float] = []
        self._row: dict | None = None
        self._lanes: list[dict] = []
        self._held_out: tuple[int, float, int] | None = None
        self._live = RichLive(self._draw(), console=self.console, refresh_per_second=4)
        self._live.start()

    def show_step(self, step: int, result: StepResult) -> None:
        """Advance the progress bar, and add the step's loss to its plot."""
        self._progress.update(self._task, completed=step)
        if result.loss is not None and math.isfinite(result.loss):
            self._losses.append(result.loss)
        self._live.update(self._draw())

    def show_metrics(self, row: dict, ranks: list[dict]) -> None:
        """Update the metrics of the last step, and the table with step time, bytes sent and memory of each rank."""
        self._row, self._lanes = row, ranks
        self._live.update(self._draw())

    def show_held_out_loss(self, step: int, loss: float, num_models: int = 1) -> None:
        """Update the displayed loss on held-out text, in nats per token, measured after step `step`.

        num_models: the number of different replicas over which it is a mean.
        """
        self._held_out = (step, loss, num_models)
        self._live.update(self._draw())

    def show_sample(self, prompt: str, continuation: str) -> None:
        """Print a prompt and the model's continuation, which is in bold."""
        self.console.rule("sample: held-out text, then the model", align="left", style="dim")
        self.console.print(Text.assemble((prompt, "dim"), (continuation, "bold")))
        self.console.rule(style="dim")

    def show_final_losses(self, held_out_loss: float, baselines: dict[str, float]) -> None:
        """Print the held-out loss at the end of the run, and the losses to compare it with.

        held_out_loss, baselines (by name, such as "bigram"): in nats per token.
        """
        self.print_note(format_final_losses(held_out_loss, baselines))

    def print_note(self, line: str) -> None:
        """Print a line of text above the part of the view that is redrawn."""
        # Text, so that a folder called [red] is not read as markup.
        self.console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Redraw the view for the last time, without the line about Ctrl-C."""
        self._over = True
        self._live.update(self._draw())
        self._live.stop()

    def _draw(self) -> Group:
        """Return what the terminal shows: progress, metrics, ranks, and how to stop the run."""
        parts = [self._progress, self._make_metrics_table()]
        if self._lanes:
            parts.append(self._make_rank_table())
        if not self._over:
            parts.append(self._stop)
        return Group(*parts)

    def _make_metrics_table(self) -> Table:
        """Return the metrics of the last step as a table."""
        table = Table.grid(padding=(0, 2))
        row = self._row
        if row is None:
            table.add_row("the first step is running")
            return table
        table.add_row("loss", format_loss(row), sparkline(self._losses, 40))
        if self._held_out:
            step, loss, num_models = self._held_out
            table.add_row("held-out loss", f"{loss:.4f}", f"after step {step}{describe_models(num_models)}")
        table.add_row("gradient norm", format_grad_norm(row), f"learning rate {row['lr']:.2e}")
        table.add_row("tokens/s", f"{row['tokens_per_s']:,.0f}", f"mfu {row['mfu']:.1%}" if "mfu" in row else "")
        return table

    def _make_rank_table(self) -> Table:
        """Return step time, bytes sent and memory of each rank as a table."""
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for title in ("rank", "step time", "", "sent", "memory"):
            table.add_column(title, justify="left" if title == "" else "right")
        slowest = max(lane["step_time_s"] for lane in self._lanes)
        for rank, lane in enumerate(self._lanes):
            filled = round(_LANE_WIDTH * lane["step_time_s"] / slowest)
            bar = Text("█" * filled, style="cyan") + Text("░" * (_LANE_WIDTH - filled), style="dim")
            table.add_row(
                str(rank),
                f"{lane['step_time_s'] * 1e3:.0f} ms",
                bar,
                f"{lane['comm_bytes'] / MB:.1f} MB",
                f"{lane['memory'] / MB:.0f} MB",
            )
        return table


def sparkline(values: list[float], width: int) -> str:
    """Return a one-line plot of `values` of at most `width` block characters, each the mean of neighbouring values."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_SPARKS[min(7, int(8 * (value - low) / span))] for value in means)
