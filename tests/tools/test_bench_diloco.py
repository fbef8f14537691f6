"""The grid of DiLoCo's outer settings: a resumable command, and the table that the stored runs give."""

import json
from pathlib import Path

from bench.__main__ import main
from bench.compare_outer_steps import FILE, Cell, Result, Run, Setup, append_result, format_tables, read_results

DOCS = Path(__file__).parents[2] / "docs"
TINY = ("--optimizer", "adamw", "--steps", "2", "--h", "1", "--ranks", "2", "--seeds", "1")
OUTER = ("--outer-lr", "0.5", "--outer-momentum", "0")
SETUP = Setup("synthetic", 1_000, 4, 32, 32, 0.01)


def read_rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_grid_is_run_stored_and_continued(server, tmp_path, capsys):
    file = tmp_path / "grid.jsonl"
    assert main(["diloco", *TINY, *OUTER, "--file", str(file)], server) == 0
    synchronous, diloco = rows = read_rows(file)
    assert (synchronous["h"], diloco["h"], diloco["outer_lr"], diloco["exchange"]) == (1, 1, 0.5, "full")
    assert synchronous["held_out_loss"] != diloco["held_out_loss"] and synchronous["sent_bytes"] > 0
    assert "2 runs, of which 0 are in" in capsys.readouterr().out
    # After an interruption: the second run is missing.
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    assert main(["diloco", *TINY, *OUTER, "--file", str(file)], server) == 0
    assert read_rows(file) == rows
    printed = capsys.readouterr().out
    assert "2 runs, of which 1 are in" in printed
    change = 100 * (diloco["held_out_loss"] / synchronous["held_out_loss"] - 1)
    assert f"| 2 | 1 | 0.5 | 0 | {change:+.1f} % [{change:+.1f}, {change:+.1f}] (1 seed) |" in printed


def test_changes_are_of_the_seeds_that_both_have(tmp_path):
    """And of the same optimizer, number of steps and setup."""
    file, cell = tmp_path / "grid.jsonl", Cell(120, 10, 0.7, 0.5, "full")
    synchronous = {("adamw", 1): 2.0, ("adamw", 2): 4.0, ("adamw", 3): 8.0, ("muon", 1): 1.0}
    for (optimizer, seed), loss in synchronous.items():
        append_result(file, Run(SETUP, optimizer, Cell(120), seed), Result(loss, 5_000_000))
    append_result(file, Run(SETUP, "adamw", Cell(240), 1), Result(1.0, 10_000_000))
    for seed, loss in ((1, 2.2), (2, 4.0), (4, 100.0)):
        append_result(file, Run(SETUP, "adamw", cell, seed), Result(loss, 500_000))
    assert "\n".join(format_tables(read_results(file))) == (
        "synthetic, 1,000 parameters, 4 ranks, 32 x 32 tokens per step, inner learning rate 0.01:\n\n"
        "| steps | h | outer rate | outer momentum | adamw | muon | sent per rank |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| 120 | synchronous |  |  | 4.6667 | 1.0000 (1 seed) | 5.00 MB |\n"
        "| 120 | 10 | 0.7 | 0.5 | +3.3 % [+0.0, +10.0] (2 seeds) | - | 0.50 MB |\n"
        "| 240 | synchronous |  |  | 1.0000 (1 seed) | - | 10.00 MB |"
    )


def test_the_table_of_the_documentation_is_that_of_the_stored_runs():
    tables = "\n".join(format_tables(read_results(FILE)))
    assert tables in (DOCS / "benchmarks.md").read_text()


def test_impossible_options_and_damaged_files_are_refused(tmp_path, capsys):
    file = tmp_path / "grid.jsonl"
    file.write_text('{"optimizer": "adamw"\n')
    for words, message in (
        (("--h", "7", "--file", str(file)), "h is 7, which does not divide the 120 steps"),
        (("--seeds", "0", "--file", str(file)), "--seeds is 0; give --seeds 1 or more"),
        (("--file", str(tmp_path / "missing" / "grid.jsonl")), "there is no folder"),
        (("--file", str(file)), 'line 1 is not a finished run: \'{"optimizer": "adamw"\'. Delete that line'),
    ):
        assert main(["diloco", *words]) == 2
        assert message in capsys.readouterr().err
