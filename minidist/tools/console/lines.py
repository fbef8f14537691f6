"""A run as plain lines, for a file or a pipe."""

from minidist.train.agree import StepResult

MB = 1e6


class PlainView:
    """Prints one line per event. header: the first lines."""

    def __init__(self, header: list[str]):
        for line in header:
            self.note(line)

    def show_step(self, step: int, result: StepResult) -> None:
        """A step is done: nothing is printed until metrics are due."""

    def show_metrics(self, row: dict, ranks: list[dict]) -> None:
        """Print a row of metrics. ranks: step time, bytes sent and memory of every rank."""
        self.note(metrics_line(row))

    def show_held_out_loss(self, step: int, loss: float) -> None:
        """Print the loss on held-out text after a step, in nats per token."""
        self.note(f"step {step:>6}  held-out loss {loss:.4f}")

    def show_sample(self, prompt: str, continuation: str) -> None:
        """Print a prompt and the model's continuation."""
        self.note("sample: held-out text up to the bar, then the model")
        self.note("\n".join("    " + line for line in f"{prompt}\u2503{continuation}".splitlines()))

    def show_end(self, held_out: float, lines: dict[str, float]) -> None:
        """Print the last held-out loss, and the losses to compare it with by name."""
        self.note(end_line(held_out, lines))

    def note(self, line: str) -> None:
        """Print a line of any other content."""
        print(line, flush=True)

    def close(self) -> None:
        """Training is over; notes may still come."""


def metrics_line(row: dict) -> str:
    """Format a row of metrics as one line."""
    loss = "no tokens" if row["loss"] is None else f"{row['loss']:.4f}"
    line = (
        f"step {row['step']:>6}  loss {loss}  grad norm {norm_text(row)}  lr {row['lr']:.2e}  "
        f"{row['step_time_s'] * 1e3:.0f} ms  {row['tokens_per_s']:,.0f} tokens/s  "
        f"sent {row['comm_bytes'] / MB:.1f} MB  memory {row['memory'] / MB:.0f} MB"
    )
    return line + (f"  mfu {row['mfu']:.1%}" if "mfu" in row else "")


def norm_text(row: dict) -> str:
    """Format the gradient norm of a row; a scaled loss may have overflowed."""
    return f"overflow at scale {row['loss_scale'] * 2:g}" if row["grad_norm"] is None else f"{row['grad_norm']:.3f}"


def end_line(held_out: float, lines: dict[str, float]) -> str:
    """Compare the last held-out loss with the losses of n-gram models, in one line."""
    others = ", ".join(f"{name} {value:.4f}" for name, value in lines.items())
    verdict = "" if "bigram" not in lines else "below" if held_out < lines["bigram"] else "not below"
    return f"held-out loss {held_out:.4f} nats per token ({others})" + (verdict and f": {verdict} the bigram model")
