"""`python -m bench calibrate`: the figures derived from timings, and a short run."""

import json

import matplotlib.image
import pytest

from bench.__main__ import main as bench
from bench.calibrate_link import Calibration, main
from minidist.tools.network.calibrate import BACKEND, TimedOperation
from minidist.tools.network.cost import MODELLED_ALGORITHMS, Link, fastest_algorithm

LINK = Link(alpha_s=1e-4, beta_s=1e-9, gamma_s=2e-10)
KINDS = [("round", ""), ("add", ""), ("all_reduce", BACKEND)]
KINDS += [(name, algorithm) for name, algorithms in MODELLED_ALGORITHMS.items() for algorithm in algorithms]


def made(ranks: int, link: Link = LINK, slower: dict | None = None) -> Calibration:
    """A calibration whose timings follow the model; those of `slower`, by (name, algorithm), by a factor."""
    samples = []
    for name, algorithm in KINDS:
        for n in (1 << k for k in range(12, 24)):
            seconds = TimedOperation(name, algorithm, ranks, n, 0.0).cost.seconds(link)
            samples.append(
                TimedOperation(name, algorithm, ranks, n, seconds * (slower or {}).get((name, algorithm), 1))
            )
    return Calibration(ranks, samples)


def test_half_of_the_sizes_are_fitted_and_half_are_held_out():
    found = made(4)
    fitted, held = {s.num_bytes for s in found.fit_samples}, {s.num_bytes for s in found.held_out_samples}
    assert len(fitted) == len(held) == 6 and not fitted & held
    assert not any(s.name in ("round", "add") for s in found.held_out_samples)


def test_timings_that_follow_the_model_are_predicted():
    from_link, own = made(6).held_out_errors()
    assert len(from_link) == len(own) == 6 * (len(KINDS) - 2) and max(*from_link, *own) < 1e-5


def test_what_is_slower_than_its_messages_shows_in_the_link_and_not_in_its_own_fit():
    found = made(4, slower={("all_reduce", "ring"): 2.0})
    from_link, own = found.held_out_errors(("all_reduce", "ring"))
    assert from_link == pytest.approx([0.5] * 6, rel=1e-4) and max(own) < 1e-5
    assert max(found.held_out_errors(("all_reduce", "tree"))[0]) < 1e-5


def test_the_winner_is_what_was_fastest_and_a_wrong_choice_has_its_price():
    found = made(4)
    for n in found.sizes:
        assert found.fastest_measured(n) == fastest_algorithm("all_reduce", 4, n, LINK)
        assert found.slowdown_of_prediction(n) == pytest.approx(1)
    large = found.sizes[-1]
    assert found.fastest_measured(large) == "doubling"
    slow = made(4, slower={("all_reduce", "doubling"): 3.0})
    assert slow.fastest_measured(large) == "ring" and slow.slowdown_of_prediction(large) > 2


def test_the_command_measures_fits_and_draws(server, tmp_path, capsys):
    files = ["--json", str(tmp_path / "out" / "c.json"), "--picture", str(tmp_path / "out" / "c.png")]
    options = ["--ranks", "2", "--ranks", "3", "--smallest", "1024", "--largest", "8192", "--repetitions", "1", *files]
    assert main(options, server) == 0
    figures = json.loads((tmp_path / "out" / "c.json").read_text())
    assert [run["ranks"] for run in figures["runs"]] == [2, 3] and figures["machine"]["backend"] == "gloo"
    for run in figures["runs"]:
        assert all(value >= 0 for value in run["link"].values()) and any(run["link"].values())
        assert len(run["held_out_bytes"]) == 2 and run["median_error_one_link"] >= 0
        assert {fastest["measured"] for fastest in run["fastest"].values()} <= set(MODELLED_ALGORITHMS["all_reduce"])
        assert run["bucket_bytes"] >= 2**16
        timed = {f"{name} {algorithm}" for name, algorithm in KINDS[2:]} - {"all_to_all pairwise"}
        assert timed <= run["algorithm_links"].keys()
    picture = matplotlib.image.imread(tmp_path / "out" / "c.png")
    assert picture.shape[1] > 1000 and picture.std() > 0.05
    output = capsys.readouterr().out
    assert "2 ranks: alpha" in output and "median error at held-out sizes" in output and "best bucket size" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "1"], "--ranks 1: communication needs 2 ranks or more"),
        (["--backend", "foo"], "--backend foo has no CPU tensors; possible: gloo, shm"),
        (["--backend", "nccl"], "--backend nccl has no CPU tensors"),
        (["--repetitions", "0"], "--repetitions is 0; it must be at least 1"),
        (["--smallest", "1024", "--largest", "4096"], "these are 3 sizes when each is twice"),
        (["--smallest", "0"], "these are 0 sizes"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message, capsys):
    assert main(options, server=object()) == 2
    assert message in capsys.readouterr().err
    assert bench(["calibrate", *options], server=object()) == 2
    assert message in capsys.readouterr().err
