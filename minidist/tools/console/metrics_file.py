"""metrics.jsonl and config.toml in the run folder, written by rank 0."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from minidist.config import Config, to_toml
from minidist.errors import RunError
from minidist.tools.output_files import write_atomically
from minidist.train.run_folder import describe_last_checkpoint


class MetricsFile:
    """Writer of metrics.jsonl: one JSON object per line, appended and flushed.

    {"start": 0, "corpus": fingerprint, ...} when a run starts or resumes, {"step": 10, "loss": ...} per log step,
    {"step": 100, "held_out_loss": ...} per evaluation, {"saved_step": 100, ...} per checkpoint. A run that resumes at
    step `start` keeps the lines up to that step, from this folder or the folder `source`, and drops later ones.
    rows: the lines of the file. earlier_rows: what the attempt before has left, with those that are dropped.
    Raises RunError if the folder is not writable.
    """

    def __init__(self, folder: Path, config: Config, start: int, source: Path | None = None):
        self.path = folder / "metrics.jsonl"
        self.earlier_rows = read_metrics((source or folder) / self.path.name)
        self.rows = [row for row in self.earlier_rows if start and _is_kept(row, start)]
        with convert_write_errors(folder):
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
            write_atomically(folder / "config.toml", to_toml(config))

    def write_row(self, row: dict) -> None:
        """Append one line. Raises RunError if the file cannot be written."""
        self.rows.append(row)
        with convert_write_errors(self.path.parent), self.path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def _is_kept(row: dict, start: int) -> bool:
    return row.get("step", row.get("saved_step", start)) <= start and row.get("start", -1) < start


def read_metrics(path: Path) -> list[dict]:
    """Read the rows of a metrics file, without a last line that a crash has truncated."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


@contextlib.contextmanager
def convert_write_errors(folder: Path) -> Iterator[None]:
    """Return a context manager that turns an OSError inside it into a RunError about the run folder `folder`."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be written: {error.strerror or error}. {describe_last_checkpoint(folder)}"
        ) from error
