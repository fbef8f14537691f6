"""`minidist consistency`: the modes side by side, their bytes, their times on the virtual clock, and bad input."""

import dataclasses
import json
from pathlib import Path

import matplotlib
import pytest

from minidist.errors import UserError
from minidist.tools.cli import main as cli
from minidist.tools.consistency.clock import COMPUTING, LINK_BUSY, MESSAGE, WAITING, Durations
from minidist.tools.consistency.comparison import (
    end_of_phases,
    mean_seconds_in_phase,
    modelled_sent_bytes,
    simulate_phases,
    with_message_times,
)
from minidist.tools.consistency.comparison_options import ConsistencyOptions, plan_modes
from tests.helpers.small_run import with_changes, write_text

matplotlib.use("Agg")
TINY = (
    *("--model.hidden-size", "16", "--model.intermediate-size", "24", "--model.num-layers", "1"),
    *("--train.global-batch", "6", "--train.eval-samples", "8", "--data.seq-len", "16", "--data.min-length", "3"),
    *("--precision.policy", "fp64", "--optim.kind", "sgd", "--optim.lr", "0.3", "--optim.clip-norm", "none"),
    *("--optim.warmup-steps", "2"),
)
PARAMETER_BYTES = 8  # float64


def compare(folder, *words):
    """Run the command on the tiny model; return the JSON document's modes by name."""
    text, file = write_text(folder), folder / "found.json"
    assert cli(["consistency", *TINY, "--data.path", str(text), "--json", str(file), *map(str, words)]) == 0
    return {mode["name"]: mode for mode in json.loads(file.read_text())["modes"]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All modes: four steps of three ranks, the last of which is half as fast; and the picture."""
    folder = tmp_path_factory.mktemp("comparison")
    modes = compare(
        folder,
        *("--ranks", 3, "--steps", 4, "--seeds", 2, "--h", 1, 2, "--bound", 0, 1, "--slow", "2:2"),
        *("--exchange", "full", "int8"),
        *("--plot", folder / "found.png"),
    )
    return modes, folder / "found.png"


def test_equal_modes_have_equal_losses(found):
    """A central server, staleness bound 0, and averaging after every SGD step are synchronous training."""
    modes, _ = found
    expected = modes["synchronous"]["held_out_losses"]
    assert len(expected) == 2 and expected[0] != expected[1]
    for name in ("central", "local h=1", "stale s=0"):
        assert modes[name]["held_out_losses"] == pytest.approx(expected, rel=1e-12), name
    for name in ("local h=2", "diloco h=2", "gossip h=2", "asynchronous"):
        assert modes[name]["held_out_losses"] != pytest.approx(expected, rel=1e-9), name


def test_bytes_are_those_of_estimate(found):
    modes, _ = found
    live = [mode for mode in modes.values() if mode["sent_bytes_are"] == "counted"]
    assert len(live) == 10
    for mode in live:
        assert mode["sent_bytes"] == mode["expected_bytes"] and min(mode["sent_bytes"]) > 0, mode["name"]
    assert max(modes["local h=2"]["sent_bytes"]) < 0.51 * max(modes["synchronous"]["sent_bytes"])
    assert max(modes["diloco h=2 int8"]["sent_bytes"]) < 0.5 * max(modes["diloco h=2"]["sent_bytes"])
    # The server, on rank 0, answers the pulls of two workers; a worker sends its gradients.
    sent = modes["asynchronous"]["sent_bytes"]
    assert sent[0] == 2 * sent[1] and sent[1] == sent[2] and sent[1] % (4 * PARAMETER_BYTES) == 0
    assert sent[1] == pytest.approx(modes["central"]["sent_bytes"][1], rel=0.05)


def test_drift_and_staleness(found):
    modes, _ = found
    for name in ("synchronous", "central", "local h=1"):
        assert all(drift < 1e-6 for of_seed in modes[name]["drifts"] for drift in of_seed), name
    for name in ("local h=2", "diloco h=2", "gossip h=2"):
        assert [len(of_seed) for of_seed in modes[name]["drifts"]] == [2, 2]
        assert all(drift > 1e-5 for of_seed in modes[name]["drifts"] for drift in of_seed), name
    assert sum(modes["asynchronous"]["staleness"].values()) == 2 * 4 * 3
    assert set(modes["stale s=0"]["staleness"]) == {"0", "1", "2"}, "the pushes of one step follow each other"
    assert modes["synchronous"]["staleness"] == {}


def test_live_ranks_have_times_and_the_picture_is_drawn(found):
    modes, picture = found
    for mode in modes.values():
        assert 0 < mode["live"]["waited_s"] < mode["live"]["step_s"]
        assert (mode["expected_bytes"] is None) == (mode["sent_bytes_are"] == "modelled")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_virtual_runs_are_the_same_twice(found, tmp_path):
    modes, _ = found
    words = (
        "--ranks",
        3,
        "--steps",
        4,
        "--seeds",
        2,
        "--bound",
        1,
        "--slow",
        "2:2",
        "--modes",
        "asynchronous",
        "stale",
    )
    again = compare(tmp_path, *words)
    for name in ("asynchronous", "stale s=1"):
        assert again[name] | {"live": None} == modes[name] | {"live": None}


def test_one_rank_is_equal_in_all_modes(tmp_path):
    words = ("--ranks", 1, "--steps", 2, "--seeds", 1, "--modes", "synchronous", "asynchronous")
    modes = compare(tmp_path, *words)
    assert modes["asynchronous"]["held_out_losses"] == pytest.approx(modes["synchronous"]["held_out_losses"], rel=1e-12)
    assert modes["synchronous"]["sent_bytes"] == modes["asynchronous"]["sent_bytes"] == [0]


# -- times on the virtual clock ---------------------------------------------------------------------------------------


def virtual(mode, compute_s, steps=4, h=2, bytes_per_s=1e6):
    """The configuration of a mode, and its phases for these durations of a step."""
    options = ConsistencyOptions(modes=(mode,), ranks=len(compute_s), steps=steps, h=(h,) if mode in USES_H else None)
    [mode], _ = plan_modes(options)
    durations = with_message_times(Durations(compute_s, [0.0] * len(compute_s)), mode.config, bytes_per_s)
    return mode.config, simulate_phases(mode.config, durations, bytes_per_s)


USES_H = ("local", "diloco", "gossip")
UNEVEN = [1.0, 1.0, 1.0, 3.0]


def test_synchronous_steps_wait_for_the_slow_rank():
    config, phases = virtual("synchronous", UNEVEN)
    messages_s = max(modelled_sent_bytes(config, 4)) / 1e6
    assert end_of_phases(phases) == pytest.approx(4 * 3.0 + messages_s)
    assert mean_seconds_in_phase(phases, WAITING) == pytest.approx(3 / 4 * 4 * 2.0)
    assert mean_seconds_in_phase(phases, COMPUTING) == pytest.approx(4 * (3 * 1.0 + 3.0) / 4)


@pytest.mark.parametrize("mode", ["local", "diloco"])
def test_local_steps_send_after_h_steps_only(mode):
    config, phases = virtual(mode, UNEVEN, h=2)
    messages_s = max(modelled_sent_bytes(config, 4)) / 1e6
    assert sum(phase.kind == MESSAGE for phase in phases[0]) == 2
    assert end_of_phases(phases) == pytest.approx(4 * 3.0 + messages_s)


def test_gossip_waits_for_neighbours_only():
    """Rank 4 is slow; rank 2 of six ranks is not its neighbour, and does not wait in the first two of four rounds."""
    config, phases = virtual("gossip", [1.0, 1.0, 1.0, 1.0, 3.0, 1.0], h=1)
    waits = [[round(p.stop - p.start, 9) for p in own if p.kind == WAITING] for own in phases]
    assert waits[4] == [] and waits[3][0] == 2.0 and waits[5][0] == 2.0
    starts = [[p.start for p in own if p.kind == WAITING] for own in phases]
    assert starts[2][0] > starts[3][0] > 0.9 and starts[1][0] > starts[2][0]
    _, local = virtual("local", [1.0] * 6, h=1)
    end = local[0][-1].stop - local[0][-1].start
    assert [own[-1].stop - own[-1].start for own in phases] == pytest.approx([end] * 6), "the last is an all-reduce"
    assert len({own[-1].stop for own in phases}) == 1


def test_the_link_of_a_central_server_is_busy():
    """The server sends to three workers one after the other, so each begins one message later than the one before."""
    config, phases = virtual("central", [1.0] * 4, steps=2)
    message_s = PARAMETER_BYTES // 2 * config.model.num_parameters() / 1e6
    assert end_of_phases(phases) == pytest.approx(2 * (1.0 + 4 * message_s), rel=1e-6)
    assert mean_seconds_in_phase(phases, LINK_BUSY) > 0 and not any(phase.kind == MESSAGE for phase in phases[0])


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seeds": 0}, "--seeds is 0; give --seeds 1 or more"),
        ({"h": (7,)}, "h is 7, which does not divide the 120 steps: .* --steps 119 or 126, or --h 1"),
        ({"modes": ("local",), "bound": (3,)}, "--bound 3 has no effect: .* Add stale to --modes"),
        ({"modes": ("synchronous",), "h": (10,)}, "--h has no effect: it is for local diloco gossip"),
        ({"bound": (-1,)}, "--bound is -1: give staleness bounds of 0 or more"),
        ({"slow": ("4:2",)}, "'4:2' is not RANK:FACTOR, a rank from 0 to 3 .*: give --slow 3:2"),
        ({"slow": ("1:0",)}, "a factor above 0"),
        ({"link_mbit": 0.0}, "--link-mbit is 0.0; it must be above 0"),
        ({"spread": 1.0}, "--spread is 1.0; it must be 0 or more and below 1"),
        ({"plot": "a.txt"}, "--plot a.txt must be a picture"),
        ({"json": "missing/a.json"}, "--json missing/a.json: there is no folder"),
        ({"run__mesh__tp": 2}, "--mesh.tp 2: in a comparison every rank is a replica of the full model; leave it out"),
        ({"run__zero__stage": 1}, "--zero.stage 1: in a comparison every rank is a replica"),
        ({"run__consistency__mode": "local"}, "has runs of its own; give --modes instead"),
        ({"run__device": "cuda"}, "the runs are on the CPU; leave it out"),
        ({"run__consistency__outer_lr": 0.5, "modes": ("local",)}, "--consistency.outer-lr has no effect: it is for d"),
        ({"run__consistency__server": 4, "modes": ("stale",)}, "server is 4, and the ranks are 0 to 3: give"),
        ({"run__train__micro_batches": 2, "modes": ("asynchronous",)}, "leave asynchronous out of --modes"),
        ({"run__precision__policy": "bf16", "modes": ("stale",)}, "in fp32 or fp64 .* leave stale out of --modes"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes, message):
    options = ConsistencyOptions()
    for name, value in changes.items():
        if name.startswith("run__"):
            options = dataclasses.replace(options, run=with_changes(options.run, **{name[5:]: value}))
        else:
            value = Path(value) if name in ("plot", "json") else value
            options = dataclasses.replace(options, **{name: value})
    with pytest.raises(UserError, match=message):
        plan_modes(options)
