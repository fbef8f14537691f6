"""The display of a run as plain lines, for a file or a pipe."""

from minidist.train.agree import StepResult

MB = 1e6


class PlainView:
    """Displays a run as plain lines, one per event. header: the lines that describe the run, printed first."""

    def __init__(self, header: list[str]):
        for line in header:
            self.print_note(line)

    def show_step(self, step: int, result: StepResult) -> None:
        """Show that `step` steps are done. Called after every step; plain lines are printed in `show_metrics` only."""

    def show_metrics(self, row: dict, ranks: list[dict]) -> None:
        """Print a row of metrics.jsonl as a line. ranks: not shown here; by rank, a dict with step_time_s (seconds),
        comm_bytes (bytes sent) and memory (peak bytes)."""
        self.print_note(format_metrics(row))

    def show_held_out_loss(self, step: int, loss: float) -> None:
        """Print the loss on held-out text after a step, in nats per token."""
        self.print_note(f"step {step:>6}  held-out loss {loss:.4f}")

    def show_sample(self, prompt: str, continuation: str) -> None:
        """Print a prompt and the model's continuation."""
        self.print_note("sample: held-out text up to the bar, then the model")
        self.print_note("\n".join("    " + line for line in f"{prompt}\u2503{continuation}".splitlines()))

    def show_end(self, held_out: float, baselines: dict[str, float]) -> None:
        """Print the final held-out loss. baselines: losses to compare it with, by name, in nats per token."""
        self.print_note(format_final_losses(held_out, baselines))

    def print_note(self, line: str) -> None:
        """Print a line of text that is no event of the run."""
        print(line, flush=True)

    def close(self) -> None:
        """End the display of training; `print_note` and `show_end` may still be called."""


def format_metrics(row: dict) -> str:
    """Format a row of metrics.jsonl that has the metrics of a step as one line."""
    loss = format_loss(row)
    line = (
        f"step {row['step']:>6}  loss {loss}  grad norm {format_grad_norm(row)}  lr {row['lr']:.2e}  "
        f"{row['step_time_s'] * 1e3:.0f} ms  {row['tokens_per_s']:,.0f} tokens/s  "
        f"sent {row['comm_bytes'] / MB:.1f} MB  memory {row['memory'] / MB:.0f} MB"
    )
    line += f"  mfu {row['mfu']:.1%}" if "mfu" in row else ""
    return line + (f"  waits for rank {row['straggler']['rank']}" if "straggler" in row else "")


def format_loss(row: dict) -> str:
    """Format the loss of a metrics row: "not finite" or "no tokens" if the step has none."""
    if row["loss"] is None:
        return "not finite" if row.get("skipped") else "no tokens"
    return f"{row['loss']:.4f}"


def format_grad_norm(row: dict) -> str:
    """Format the gradient norm of a metrics row; if gradients overflowed, format the loss scale of that step
    instead."""
    if row["grad_norm"] is None:
        return "not finite" if row.get("skipped") else f"overflow at scale {row['loss_scale'] * 2:g}"
    return f"{row['grad_norm']:.3f}"


def format_final_losses(held_out: float, baselines: dict[str, float]) -> str:
    """Format the final held-out loss beside `baselines`: losses by name, such as "bigram", in nats per token."""
    others = ", ".join(f"{name} {value:.4f}" for name, value in baselines.items())
    verdict = "" if "bigram" not in baselines else "below" if held_out < baselines["bigram"] else "not below"
    return f"held-out loss {held_out:.4f} nats per token ({others})" + (verdict and f": {verdict} the bigram model")
