"""The stored grid of local steps: changes against synchronous training of the same seed, and the best settings."""

import json

import matplotlib
import pytest

from minidist.errors import UserError
from minidist.tools.consistency.grid import Change, best_settings, plot_changes, read_grid

matplotlib.use("Agg")


def run(h, loss, seed, outer_lr=None, momentum=None, optimizer="muon"):
    where = {"text": "one", "optimizer": optimizer, "h": h, "outer_lr": outer_lr, "outer_momentum": momentum}
    return where | {"seed": seed, "held_out_loss": loss, "sent_bytes": 400 // h}


RUNS = [
    *(run(1, 2.0 * seed, seed) for seed in (1, 2)),
    *(run(4, 2.0 * seed * 1.1, seed, 0.7, 0.0) for seed in (1, 2)),
    *(run(4, 2.0 * seed * (1 + 0.01 * seed), seed, 1.0, 0.5) for seed in (1, 2)),
    run(1, 1.0, 1, optimizer="adamw"),
    run(4, 1.5, 1, 0.7, 0.0, "adamw"),
]


def test_the_best_settings_have_the_least_mean_change_and_not_the_least_loss():
    best = best_settings(RUNS)
    assert list(best) == [("one", "adamw", 4), ("one", "muon", 4)]
    change = best["one", "muon", 4]
    assert change.changes == pytest.approx((0.01, 0.02)) and (change.outer_lr, change.outer_momentum) == (1.0, 0.5)
    assert change.mean == pytest.approx(0.015) and change.fewer_bytes == 4
    assert best["one", "adamw", 4].mean == pytest.approx(0.5)  # against AdamW's synchronous run


def test_the_interval_of_three_seeds_is_students():
    change = Change((0.01, 0.02, 0.03), 0.7, 0.0, 4)
    assert change.half_width == pytest.approx(4.303 * 0.01 / 3**0.5)


def test_plot_returns_percent_and_refuses_nothing():
    best = {("one", "muon", 4): Change((0.01, 0.02, 0.03), 0.7, 0.0, 4)}
    [(mean, half_width)] = plot_changes(best).values()
    assert (mean, half_width) == (pytest.approx(2), pytest.approx(4.303 / 3**0.5))
    with pytest.raises(UserError, match="no changes"):
        plot_changes({})


def test_a_grid_without_runs_names_the_command(tmp_path):
    file = tmp_path / "grid.jsonl"
    with pytest.raises(UserError, match="python -m bench diloco"):
        read_grid(file)
    file.write_text(json.dumps(RUNS[0]) + "\n")
    assert read_grid(file) == RUNS[:1]
