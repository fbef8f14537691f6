"""metrics.jsonl and config.toml in the run folder, written by rank 0."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from minidist.config import Config, to_toml
from minidist.tools.console.goodput import has_valid_accounts, is_end_of_complete_run
from minidist.tools.output_files import write_atomically


class MetricsFile:
    """Writes metrics.jsonl of a run: one JSON object (a row) per line, appended and flushed; also config.toml.

    It writes {"start": 0, "corpus": fingerprint, ...} when a run starts or resumes, {"step": 10, "loss": ...} per log
    step, {"step": 100, "held_out_loss": ...} per evaluation (with "held_out_models", the number of replicas, if these
    differed and the loss is their mean), {"saved_step": 100, ...} per checkpoint. A run that resumes at step `start`
    keeps the rows up to that step, from this folder or the folder `source`, and drops later ones. Lines that are no
    rows of this trainer stay in the file as they are. Nothing is written if the run of this folder is complete,
    so that there is nothing to do.
    rows: the rows of the file. earlier_rows: all rows that the previous attempt has left, also those that are dropped.
    is_complete: whether the run had been trained and evaluated to its last step before.
    note_failed_write: called with a file that cannot be read or written and the error. Rows that a full disk has
    refused are written with the next row for which there is space.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        start: int,
        source: Path | None,
        note_failed_write: Callable[[str, OSError], None],
    ):
        self.path, self._note_failed_write = folder / "metrics.jsonl", note_failed_write
        self._is_readable, self._has_all_lines = True, False  # whether the file has all of `_lines`
        found: list[tuple[bytes, dict | None]] = []
        try:
            found = _read_lines((source or folder) / self.path.name)
        except OSError as error:
            self._is_readable = False
            note_failed_write(str(self.path), error)
        self.earlier_rows = [row for _, row in found if row is not None]
        is_own = source is None or source.resolve() == folder.resolve()
        self.is_complete = is_own and start == config.train.steps and is_end_of_complete_run(self.earlier_rows)
        kept = [(line, row) for line, row in found if row is None or (start and _is_kept(row, start))]
        self._lines = [line for line, _ in kept]
        self.rows = [row for _, row in kept if row is not None]
        if self.is_complete:
            return
        self._write_lines(self._lines)
        try:
            write_atomically(folder / "config.toml", to_toml(config))
        except OSError as error:
            note_failed_write(str(folder / "config.toml"), error)

    def write_row(self, row: dict) -> None:
        """Append `row` to the file as a line of JSON, unless the run was complete before."""
        if self.is_complete:
            return
        line = json.dumps(row).encode()
        self.rows.append(row)
        self._lines.append(line)
        self._write_lines([line])

    def _write_lines(self, new_lines: Sequence[bytes]) -> None:
        """Append lines; if the file lacks earlier ones, rewrite it, unless it could not be read."""
        try:
            if self._has_all_lines or not self._is_readable:
                with self.path.open("ab") as stream:
                    stream.write(b"".join(line + b"\n" for line in new_lines))
            else:
                write_atomically(self.path, b"".join(line + b"\n" for line in self._lines))
            self._has_all_lines = True
        except OSError as error:
            self._has_all_lines = False
            self._note_failed_write(str(self.path), error)


def _is_kept(row: dict, start: int) -> bool:
    """Return whether a run that resumes at step `start` keeps this row."""
    return row.get("step", row.get("saved_step", start)) <= start and row.get("start", -1) < start


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl; [] if there is no such file.

    Lines of other programs, and a last line that a crash has truncated, are skipped.
    """
    return [row for _, row in _read_lines(path) if row is not None]


def _read_lines(path: Path) -> list[tuple[bytes, dict | None]]:
    """Return the lines of a metrics file, each with its row; None for a line that this trainer has not written.

    Leaves out a last line that a crash has truncated.
    """
    *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if last and (not last.startswith(b"{") or _parse_row(last) is not None):
        lines.append(last)
    return [(line, _parse_row(line)) for line in lines]


def _parse_row(line: bytes) -> dict | None:
    """Return the row in a line, or None if the line is no row of this trainer."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    steps = [row[name] for name in ("step", "saved_step", "start", "end") if name in row]
    losses = [row[name] for name in ("loss", "held_out_loss") if row.get(name) is not None]
    valid = steps and all(isinstance(step, int) for step in steps) and ("step" in row or not losses)
    valid = valid and all(isinstance(loss, int | float) for loss in losses) and has_valid_accounts(row)
    return row if valid else None
