"""The display of a run as plain lines, for a file or a pipe."""

from minidist.train.step_result import StepResult

MB = 1e6


class PlainView:
    """Prints the progress of a run as plain lines, one per event. header: lines about the run, printed first."""

    def __init__(self, header: list[str]):
        for line in header:
            self.print_note(line)

    def show_step(self, step: int, result: StepResult) -> None:
        """Do nothing: plain lines are printed by `show_metrics`. Called after every step."""

    def show_metrics(self, row: dict, ranks: list[dict]) -> None:
        """Print the metrics of a step, a row of metrics.jsonl, as one line. ranks: the metrics of each rank, not shown
        here."""
        self.print_note(format_metrics(row))

    def show_held_out_loss(self, step: int, loss: float, num_models: int = 1) -> None:
        """Print the loss on held-out text after step `step`, in nats per token.

        num_models: the number of different replicas over which it is a mean.
        """
        self.print_note(f"step {step:>6}  held-out loss {loss:.4f}{describe_models(num_models)}")

    def show_sample(self, prompt: str, continuation: str) -> None:
        """Print a prompt and the text with which the model continues it."""
        self.print_note("sample: held-out text up to the bar, then the model")
        self.print_note("\n".join("    " + line for line in f"{prompt}\u2503{continuation}".splitlines()))

    def show_final_losses(self, held_out_loss: float, baselines: dict[str, float]) -> None:
        """Print the held-out loss at the end of the run, and the losses to compare it with.

        held_out_loss, baselines (by name, such as "bigram"): in nats per token.
        """
        self.print_note(format_final_losses(held_out_loss, baselines))

    def print_note(self, line: str) -> None:
        """Print a line of text, such as a warning."""
        print(line, flush=True)

    def close(self) -> None:
        """Stop displaying steps: training is over. `print_note` and `show_final_losses` may still be called."""


def format_metrics(row: dict) -> str:
    """Format the metrics of a step, a row of metrics.jsonl, as one line of text."""
    loss = format_loss(row)
    line = (
        f"step {row['step']:>6}  loss {loss}  grad norm {format_grad_norm(row)}  lr {row['lr']:.2e}  "
        f"{row['step_time_s'] * 1e3:.0f} ms  {row['tokens_per_s']:,.0f} tokens/s  "
        f"sent {row['comm_bytes'] / MB:.1f} MB  memory {row['memory'] / MB:.0f} MB"
    )
    line += f"  mfu {row['mfu']:.1%}" if "mfu" in row else ""
    return line + (f"  waits for rank {row['straggler']['rank']}" if "straggler" in row else "")


def format_loss(row: dict) -> str:
    """Format the loss of a metrics.jsonl row as text: "not finite" or "no tokens" if the step has no loss."""
    if row["loss"] is None:
        return "not finite" if row.get("skipped") else "no tokens"
    return f"{row['loss']:.4f}"


def format_grad_norm(row: dict) -> str:
    """Format the gradient norm of a metrics.jsonl row as text; the loss scale instead if gradients overflowed."""
    if row["grad_norm"] is None:
        return "not finite" if row.get("skipped") else f"overflow at scale {row['loss_scale'] * 2:g}"
    return f"{row['grad_norm']:.3f}"


def describe_models(num_models: int) -> str:
    """Return what a held-out loss is a mean of, to follow its value; "" for one model."""
    return "" if num_models == 1 else f", the mean of {num_models} replicas that differ, each on its part of the text"


def format_final_losses(held_out_loss: float, baselines: dict[str, float]) -> str:
    """Format the held-out loss at the end of a run, and the losses to compare it with, as one line of text.

    held_out_loss, baselines (by name, such as "bigram"): in nats per token.
    """
    others = ", ".join(f"{name} {value:.4f}" for name, value in baselines.items())
    verdict = "" if "bigram" not in baselines else "below" if held_out_loss < baselines["bigram"] else "not below"
    return f"held-out loss {held_out_loss:.4f} nats per token ({others})" + (
        verdict and f": {verdict} the bigram model"
    )
