"""What a person sees of a run: one plain line per log step, or a live view on a terminal. Only rank 0 speaks."""

import sys
from pathlib import Path

from minidist.comm import World
from minidist.config import Config
from minidist.mesh import Mesh
from minidist.train.agree import StepResult

MB = 1e6


class Silent:
    """What the other ranks say. Each method is told what happens, as it happens."""

    def step(self, step: int, result: StepResult) -> None:
        """A step is done."""

    def log(self, row: dict, lanes: list[dict]) -> None:
        """A line of metrics, and what each rank did in that step."""

    def held_out(self, step: int, loss: float) -> None:
        """The loss on held-out text after a step, in nats per token."""

    def text(self, prompt: str, continuation: str) -> None:
        """What the model makes of the prompt."""

    def end(self, held_out: float, lines: dict[str, float]) -> None:
        """The last held-out loss, and losses to compare it with by name."""

    def note(self, line: str) -> None:
        """Anything else worth a line."""

    def close(self) -> None:
        """Training is over; notes may still come."""


class Plain(Silent):
    """Lines, for a file or a pipe."""

    def __init__(self, header: list[str]):
        for line in header:
            self.note(line)

    def log(self, row: dict, lanes: list[dict]) -> None:
        self.note(metrics_line(row))

    def held_out(self, step: int, loss: float) -> None:
        self.note(f"step {step:>6}  held-out loss {loss:.4f}")

    def text(self, prompt: str, continuation: str) -> None:
        self.note("sample: held-out text up to the bar, then the model")
        self.note("\n".join("    " + line for line in f"{prompt}\u2503{continuation}".splitlines()))

    def end(self, held_out: float, lines: dict[str, float]) -> None:
        self.note(end_line(held_out, lines))

    def note(self, line: str) -> None:
        print(line, flush=True)


def metrics_line(row: dict) -> str:
    """One log step as one line."""
    loss = "no tokens" if row["loss"] is None else f"{row['loss']:.4f}"
    line = (
        f"step {row['step']:>6}  loss {loss}  grad norm {norm_text(row)}  lr {row['lr']:.2e}  "
        f"{row['step_time_s'] * 1e3:.0f} ms  {row['tokens_per_s']:,.0f} tokens/s  "
        f"sent {row['comm_bytes'] / MB:.1f} MB  memory {row['memory'] / MB:.0f} MB"
    )
    return line + (f"  mfu {row['mfu']:.1%}" if "mfu" in row else "")


def norm_text(row: dict) -> str:
    """The gradient norm of a log step; with scaled losses it may have overflowed."""
    return f"overflow at scale {row['loss_scale'] * 2:g}" if row["grad_norm"] is None else f"{row['grad_norm']:.3f}"


def end_line(held_out: float, lines: dict[str, float]) -> str:
    """The last held-out loss beside what counting reaches."""
    others = ", ".join(f"{name} {value:.4f}" for name, value in lines.items())
    verdict = "" if "bigram" not in lines else "below" if held_out < lines["bigram"] else "not below"
    return f"held-out loss {held_out:.4f} nats per token ({others})" + (verdict and f": {verdict} the bigram model")


def make_reporter(world: World, config: Config, mesh: Mesh, corpus: str, folder: Path, step: int) -> Silent:
    """The reporter of this rank: live on a terminal, plain lines elsewhere, silent on ranks other than 0.

    step: where the run begins, above 0 for one that goes on.
    """
    if world.rank != 0:
        return Silent()
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}"
    backend = f" over {world.backend}" if world.backend else ""
    train = config.train
    header = [
        f"{ranks}{backend}, {mesh}; model of {config.model.num_parameters():,} parameters",
        corpus,
        f"{train.steps} steps of {train.global_batch} samples x {config.data.seq_len} tokens, "
        f"{train.micro_batches} micro-batch{'es' if train.micro_batches > 1 else ''} per rank; run folder {folder}",
    ]
    if step:
        header.append(f"going on after step {step}")
    if sys.stdout.isatty():
        from minidist.tools.console.live import Live

        return Live(header, train.steps, step)
    return Plain(header)
