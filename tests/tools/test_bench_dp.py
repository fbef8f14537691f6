"""`python -m bench dp`: equal work, refusal of wrong contenders, and its instruments."""

import io
import itertools
import json
import os
import sys

import matplotlib.image
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from bench import baselines, compare_dp, contender_report, peak_memory
from bench.__main__ import main
from bench.bootstrap import median_interval, paired_ratios, slowest_rank_times
from bench.compare_contenders import Comparison, ContenderResult
from bench.contenders import MODES, NO_COMMUNICATION, ContenderContext, Minidist, NoCommunication, TorchDDP
from bench.time_contenders import TOLERANCE, max_relative_error, single_process_steps
from bench.workload import WORKLOADS, RankBatch
from minidist.comm import GroupSpec, bind
from minidist.errors import RunError
from minidist.mesh import Mesh

TINY = WORKLOADS["tiny"]
MIB = 2**20
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")

# -- statistics -------------------------------------------------------------------------------------------------------


def test_a_step_lasts_from_the_first_start_to_the_last_end():
    timings = np.array([[[0.0, 3.0], [10.0, 11.0]], [[1.0, 2.0], [10.5, 14.0]]])  # 2 ranks, 2 rounds
    assert slowest_rank_times(timings).tolist() == [3.0, 4.0]


def test_slowing_a_whole_round_does_not_change_ratios():
    slow = np.array([1.0, 7.0, 1.0, 30.0])
    assert paired_ratios(2 * slow, 4 * slow).tolist() == [0.5] * 4


def test_times_of_unequal_rounds_are_not_paired():
    with pytest.raises(ValueError, match="same number of rounds"):
        paired_ratios([1.0, 2.0], [1.0])


def test_equal_values_have_an_interval_of_no_width():
    assert median_interval([0.9] * 20) == (0.9, 0.9, 0.9)


def test_the_interval_covers_the_true_median_as_often_as_it_says():
    draws = np.random.default_rng(1).exponential(size=(300, 25))
    intervals = [median_interval(values, resamples=400) for values in draws]
    covered = np.mean([low <= np.log(2) <= high for _, low, high in intervals])  # the median of an exponential
    # 300 trials at 0.95 have a standard deviation of 0.013; four of them, and the bootstrap's own bias at 25 values.
    assert 0.88 <= covered <= 1.0
    assert all(low <= median <= high for median, low, high in intervals)
    assert np.mean([high - low for _, low, high in intervals]) < 1.2  # and it does not do so by being wide


# -- equal work -------------------------------------------------------------------------------------------------------


def verdicts(world, kinds):
    """{(name, mode): relative error against one process, or why the contender is not timed}."""
    group = bind(world, Mesh(dp=world.size), [GroupSpec("bench", ("dp",))])["bench"]
    batches, references, found = TINY.rank_batches(world.rank, world.size), single_process_steps(TINY), {}
    for name, mode in itertools.product(kinds, MODES):
        contender = (compare_dp.CONTENDERS.get(name) or WRONG[name])(ContenderContext(TINY, mode, world))
        try:
            found[name, mode] = max_relative_error(name, contender, batches, references, group)
        except RunError as error:
            found[name, mode] = str(error)
    return found


class ScaledGradient(TorchDDP):
    def backward(self, loss):
        (loss * 1.001).backward()


class MeanOfMeans(TorchDDP):
    """Every rank divides by its own count, and DDP takes the mean."""

    def step(self, batch, inspect=None):
        own = RankBatch(batch.batch, batch.batch.num_loss_tokens * self.size)
        self.full = False
        return super().step(own, inspect)


class OtherUpdate(TorchDDP):
    def prepare(self, model):
        super().prepare(model)
        self.optimizer.param_groups[0]["lr"] *= 10


class Silent(TorchDDP):
    def gradients(self):
        return {name: grad for name, grad in super().gradients().items() if name != "lm_head.weight"}


WRONG = {kind.__name__: kind for kind in (ScaledGradient, MeanOfMeans, OtherUpdate, Silent, NoCommunication)}
RIGHT = [name for name in compare_dp.CONTENDERS if name.startswith(("minidist", "torch"))]


def test_contenders_match_one_process(ranks):
    for found in ranks(verdicts, 2, RIGHT):
        assert len(found) == 2 * len(RIGHT) == 12
        for key, off in found.items():
            assert isinstance(off, float) and off < TOLERANCE / 10, key


def test_a_contender_that_computes_wrongly_is_not_timed(ranks):
    for found in ranks(verdicts, 2, list(WRONG)):
        for name in WRONG:
            assert "it is not timed" in str(found[name, "full"]), name
        assert "has no gradient of lm_head.weight on 2 ranks" in found["Silent", "bare"]


def clipping_and_counts(world):
    steps = single_process_steps(TINY)
    counts = [batch.batch.num_loss_tokens for batch in TINY.rank_batches(world.rank, world.size)]
    return [step.grad_norm for step in steps], counts


def test_the_workload_clips_and_pads_unevenly(ranks):
    (norms, ours), (_, theirs) = ranks(clipping_and_counts, 2)
    assert min(norms) > TINY.clip_norm  # otherwise a wrong norm would change nothing
    assert all(a != b for a, b in zip(ours[:3], theirs[:3], strict=True))


def kernels(world):
    return {
        name: compare_dp.CONTENDERS[name](ContenderContext(TINY, "full", world)).kernel
        for name in [*RIGHT, NO_COMMUNICATION]
    }


def test_all_run_the_same_optimizer_kernel(ranks):
    for seen in ranks(kernels, 2):
        assert set(seen.values()) == {"AdamW fused"}


def test_a_peer_that_is_not_installed_is_left_out_in_one_line(monkeypatch):
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    names, left_out = compare_dp.available_contenders(2, 8)
    assert names == [*RIGHT, NO_COMMUNICATION]
    assert len(left_out) == 2 and all("pip install -e '.[peers]'" in line for line in left_out)
    console = Console(file=io.StringIO(), width=120)
    result = ContenderResult("ours", "fused", None, [1.0], None, None, [1.0], None, None, None)
    contender_report.print_comparison(Comparison(2, "full", [result], left_out), [], console)
    assert console.file.getvalue().count("pip install -e '.[peers]'") == 2


# -- memory -----------------------------------------------------------------------------------------------------------


def buckets_of_ddp(world):
    model = nn.Linear(512, 512, bias=False)  # 1 MiB
    with peak_memory.StoragePeak() as peak:
        wrapped = nn.parallel.DistributedDataParallel(model)
        peak.reset_peak()
    del wrapped
    return peak.bytes


def test_buckets_that_ddp_holds_in_cpp_are_seen(ranks):
    for seen in ranks(buckets_of_ddp, 2):
        assert MIB <= seen < 1.1 * MIB


@needs_proc
def test_the_resident_peak_sees_memory_that_torch_did_not_allocate():
    before = peak_memory.read_pss_bytes()
    with peak_memory.PeakResidentMemory() as peak:
        held = bytearray(os.urandom(64 * MIB))
        # Until the sampling thread has looked. What earlier tests left behind may be freed meanwhile: only half counts.
        while peak.bytes - before < 32 * MIB:
            os.sched_yield()
    assert len(held) == 64 * MIB


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_figures_and_a_picture(server, tmp_path, capsys):
    figures, picture = tmp_path / "sub" / "dp.json", tmp_path / "dp.png"
    names = ["minidist", "torch DDP", "no communication"]
    only = [word for name in names for word in ("--only", name)]
    code = main(
        ["dp", "--size", "tiny", "--ranks", "2", "--mode", "full", "--rounds", "2", "--steps", "1", *only,
         "--json", str(figures), "--picture", str(picture)],
        server,
    )  # fmt: skip
    assert code == 0
    result = json.loads(figures.read_text())
    (run,) = result["comparisons"]
    assert (run["ranks"], run["mode"], list(run["contenders"])) == (2, "full", names)
    for name, row in run["contenders"].items():
        assert len(row["step_s"]) == len(row["cpu_s"]) == 2 and min(row["step_s"] + row["cpu_s"]) > 0
        assert row["kernel"] == "AdamW fused"
        assert row["tensor_bytes"] > 4 * 4 * TINY.model.num_parameters()  # weights, two moments, gradients or buckets
        assert (row["minidist_ratio"] is None) == (name == "minidist")
        assert (row["time_over_no_communication"] is None) == (name == "no communication")
    assert result["machine"]["torch"] == torch.__version__ and result["machine"]["threads_per_rank"] == 1
    assert len(run["verdicts"]) == 2
    pixels = matplotlib.image.imread(picture)[..., :3]
    red = np.abs(pixels - np.array([0xC4, 0x4E, 0x52]) / 255).max(-1) < 0.02
    assert red.mean() > 0.001  # bars of ours are drawn
    text = capsys.readouterr().out
    assert "torch DDP" in text and f"{result['machine']['cores']} cores" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "1"], "needs 2 to 8 ranks"),
        (["--ranks", "9"], "needs 2 to 8 ranks, one per sample at most"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--only", "nobody"], "'nobody': there is no such contender; possible: minidist,"),
    ],
)
def test_invalid_requests_are_refused_in_one_line(server, capsys, arguments, said):
    assert main(["dp", *arguments], server) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_minidists_bare_mode_sends_gradients_only(ranks):
    for by_use in ranks(bare_traffic, 2):
        assert by_use == {"grads"}


def bare_traffic(world):
    ours = Minidist(ContenderContext(TINY, "bare", world))
    meter = ours.engine.groups.meter
    meter.operations.clear()
    ours.step(TINY.rank_batches(world.rank, world.size)[0])
    return {use for use, _ in meter.operations}
