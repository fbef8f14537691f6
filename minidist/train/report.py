"""What a person sees of a run: one plain line per log step, or a live view on a terminal. Only rank 0 speaks."""

from pathlib import Path
from typing import Protocol

from minidist.comm import World
from minidist.config import Config
from minidist.data.corpus import Corpus
from minidist.mesh import Mesh
from minidist.train.step import StepResult

MB = 1e6


class Reporter(Protocol):
    """Told what happens, as it happens."""

    def step(self, step: int, result: StepResult) -> None: ...

    def log(self, row: dict, lanes: list[dict]) -> None:
        """A line of metrics, and what each rank did in that step."""

    def held_out(self, step: int, loss: float) -> None: ...

    def baselines(self, held_out: float, unigram: float, bigram: float, corpus: Corpus) -> None: ...

    def text(self, prompt: str, continuation: str) -> None: ...

    def note(self, line: str) -> None: ...

    def close(self) -> None: ...


class Silent:
    """What the other ranks say."""

    def step(self, step: int, result: StepResult) -> None:
        pass

    def log(self, row: dict, lanes: list[dict]) -> None:
        pass

    def held_out(self, step: int, loss: float) -> None:
        pass

    def baselines(self, held_out: float, unigram: float, bigram: float, corpus: Corpus) -> None:
        pass

    def text(self, prompt: str, continuation: str) -> None:
        pass

    def note(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


class Plain(Silent):
    """Lines, for a file or a pipe."""

    def __init__(self, header: list[str]):
        for line in header:
            self.note(line)

    def log(self, row: dict, lanes: list[dict]) -> None:
        self.note(metrics_line(row))

    def held_out(self, step: int, loss: float) -> None:
        self.note(f"step {step:>6}  held-out loss {loss:.4f}")

    def baselines(self, held_out: float, unigram: float, bigram: float, corpus: Corpus) -> None:
        for line in baseline_lines(held_out, unigram, bigram, corpus):
            self.note(line)

    def text(self, prompt: str, continuation: str) -> None:
        self.note("sample (the prompt is held-out text, the model's part begins after the mark):")
        self.note("\n".join("    " + line for line in (prompt + "\u2503" + continuation).splitlines()))

    def note(self, line: str) -> None:
        print(line, flush=True)


def metrics_line(row: dict) -> str:
    """One log step as one line."""
    loss = "no tokens" if row["loss"] is None else f"{row['loss']:.4f}"
    line = (
        f"step {row['step']:>6}  loss {loss}  grad norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
        f"{row['step_time_s'] * 1e3:.0f} ms  {row['tokens_per_s']:,.0f} tokens/s  "
        f"sent {row['comm_bytes'] / MB:.1f} MB  memory {row['memory'] / MB:.0f} MB"
    )
    return line + (f"  mfu {row['mfu']:.1%}" if "mfu" in row else "")


def baseline_lines(held_out: float, unigram: float, bigram: float, corpus: Corpus) -> list[str]:
    """The final loss beside what counting reaches."""
    verdict = "below" if held_out < bigram else "not below"
    lines = [
        f"held-out loss {held_out:.4f} nats per token, {verdict} that of a bigram model: "
        f"bigram {bigram:.4f}, unigram {unigram:.4f}"
    ]
    if corpus.entropy_rate is not None:
        lines.append(f"best possible loss on this text {corpus.entropy_rate:.4f}")
    return lines


def make_reporter(world: World, config: Config, mesh: Mesh, corpus: str, folder: Path) -> Reporter:
    """The reporter of this rank: live on a terminal, plain lines elsewhere, silent on ranks other than 0."""
    if world.rank != 0:
        return Silent()
    import sys

    ranks = f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}"
    backend = f" over {world.backend}" if world.backend else ""
    train = config.train
    header = [
        f"{ranks}{backend}, {mesh}; model of {config.model.num_parameters():,} parameters",
        corpus,
        f"{train.steps} steps of {train.global_batch} samples x {config.data.seq_len} tokens, "
        f"{train.micro_batches} micro-batch{'es' if train.micro_batches > 1 else ''} per rank; run folder {folder}",
    ]
    if sys.stdout.isatty():
        from minidist.train.live import Live

        return Live(header, config.train.steps)
    return Plain(header)
