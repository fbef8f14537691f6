"""A layout that cannot run is refused before anything starts, with its numbers and the nearest valid values."""

import subprocess
import sys
from pathlib import Path

import pytest

from minidist.config import Config
from minidist.errors import UserError
from minidist.parallel.pipeline.schedules import build_schedule, pipeline_schedule
from minidist.tools.config_warnings import find_warnings, validate_options
from minidist.tools.simulate.command import SUMMARIES
from minidist.validation import SCHEDULES, SPLIT_BACKWARD, validate
from tests.helpers.small_run import with_changes


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (
            8,
            {"mesh__pp": 8},
            r"mesh.pp is 8: 8 stages need at least one layer each, but the model has 4: give --mesh.pp 4, or ",
        ),
        (
            4,
            {"mesh__pp": 4, "parallel__schedule": "interleaved", "train__micro_batches": 4},
            r"4 stages x 2 chunks = 8 model chunks need .* the model has 4: give --mesh.pp 2, or .*layers 8",
        ),
        (
            2,
            {"mesh__pp": 2, "parallel__schedule": "interleaved", "parallel__chunks": 3, "train__micro_batches": 2},
            r"2 stages x 3 chunks = 6 model chunks need .* the model has 4: give --mesh.pp 1, or .*layers 6",
        ),
        (
            2,
            {"mesh__pp": 2, "parallel__schedule": "zb-h2", "train__micro_batches": 2},
            r"zb-h2 needs 2 x 2 stages - 1 = 3 micro-batches in flight, but there are only 2: give 3 micro",
        ),
        (
            2,
            {"mesh__pp": 2, "parallel__schedule": "interleaved", "train__micro_batches": 5},
            r"5 is not a multiple of 2. Give 4 or 6 micro-batches, or choose 1f1b",
        ),
        (2, {"mesh__pp": 2, "parallel__chunks": 2}, r"1f1b needs 1 chunk per stage, but chunks is 2: leave it out"),
        (2, {"optim__muon_steps": 0}, r"optim.muon-steps is 0; it must be from 1 to 20: change --optim.muon-steps\.$"),
        (2, {"optim__muon_momentum": 1.5}, r"optim.muon-momentum is 1.5; it must be 0 or more and below 1: change"),
        (2, {"optim__muon_lr_ratio": 0.0}, r"optim.muon-lr-ratio is 0.0; it must be above 0: change"),
        (
            4,
            {"zero__stage": 1, "zero__shard": 3},
            r"zero.shard is 3: dp=4 x cp=1 = 4 ranks cannot be divided into groups of 3 .* --zero.shard 1 or 2 or 4\.",
        ),
        (
            8,
            {"zero__stage": 3, "zero__shard": 2, "mesh__cp": 4},
            r"dp=2 x cp=4 = 8 ranks cannot be divided into groups of 2 .* Possible: --zero.shard 4 or 8\.",
        ),
        (
            2,
            {"zero__shard": 2},
            r"zero.shard is 2, but zero.stage 0 shards nothing: give --zero.stage 1, 2",
        ),
        (
            2,
            {"zero__stage": 1, "zero__keep_gradients": True},
            r"zero.keep-gradients is for stage 2, and zero.stage is 1: .* Leave --zero.keep-gradients out\.",
        ),
        (
            2,
            {"zero__stage": 1, "comm__algorithm": "ring"},
            r"comm.algorithm is ring, an all-reduce, and zero.stage 1 reduces .* or give --zero.stage 0\.",
        ),
        (
            2,
            {"comm__algorithm": "ring"},
            r"comm.algorithm is ring, .* and engine is fast with comm.gradients bucketed: give --engine simple --comm.",
        ),
        (
            2,
            {"comm__algorithm": "tree", "engine": "simple"},
            r"comm.algorithm is tree, .* engine is simple with comm.gradients bucketed: give --engine simple --comm.",
        ),
        (
            2,
            {"precision__policy": "bf16", "comm__gradients": "naive"},
            r"comm.gradients is naive, which needs zero.stage 0 \(given: 0\) and .* \(given: precision.policy bf16\)",
        ),
        (
            2,
            {"zero__offload": True, "device": "cpu"},
            r"zero.offload true has no effect: it moves master weights .* device is cpu. Leave --zero.offload out",
        ),
        (2, {"precision__policy": "fp16", "precision__loss_scale": "none"}, r"precision.loss-scale is none, and grad"),
        (3, {"mesh__tp": 3}, r"model.num_heads=4 is not divisible by tp=3; possible tp: 1, 2, 4"),
        (
            3,
            {"mesh__tp": 3, "model__num_heads": 6, "model__hidden_size": 96},
            r"model.vocab_size=256 is not divisible by tp=3; possible tp: 1, 2; or vocab_size=258",
        ),
        (
            2,
            {"mesh__cp": 2, "data__seq_len": 66},
            r"data.seq_len=66 is not divisible into 4 equal chunks, .* zigzag layout.*cp: 1, 3.*or seq_len=68\.",
        ),
        (
            2,
            {"mesh__cp": 2, "parallel__context": "ulysses", "data__seq_len": 65},
            r"data.seq_len=65 is not divisible into 2 equal chunks, .* contiguous layout.*or seq_len=66\.",
        ),
        (
            4,
            {"mesh__cp": 2, "mesh__tp": 2, "model__num_heads": 2, "parallel__context": "ulysses"},
            r"model.num_heads=2 over tp=2 leaves 1 query heads per rank, not divisible by cp=2 as ulysses",
        ),
        (
            2,
            {"mesh__tp": 2, "parallel__sequence": True, "data__seq_len": 65},
            r"data.seq_len=65 over cp=1 leaves 65 tokens per rank, not divisible by tp=2 .*seq_len=66 works",
        ),
    ],
)
def test_a_layout_that_cannot_run_is_refused_with_its_numbers(ranks, changes, message):
    with pytest.raises(UserError, match=message):
        validate_options(with_changes(Config(), **changes), ranks)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (8, {"mesh__dp": 2, "mesh__pp": 2, "mesh__tp": 2}),
        (2, {"mesh__tp": 2, "data__seq_len": 65}),  # the sequence is not sharded
        (2, {"parallel__schedule": "zb-h2", "parallel__chunks": 7}),  # without effect: there is no pipeline
        (4, {"mesh__tp": 4}),  # two key and value heads for four ranks
        (4, {"mesh__cp": 2, "mesh__tp": 2, "parallel__sequence": True, "data__seq_len": 4}),
    ],
)
def test_valid_layouts_are_accepted(ranks, changes):
    assert validate(with_changes(Config(), **changes), ranks).world_size == ranks


def test_without_a_pipeline_there_is_no_schedule():
    config = Config()
    assert pipeline_schedule(config, validate(config, 3)) is None
    staged = with_changes(config, mesh__pp=2, train__micro_batches=3)
    assert pipeline_schedule(staged, validate(staged, 4)).micro_batches == 3


def test_validation_does_not_import_torch():
    code = "import sys, minidist.validation; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], timeout=240, check=False)
    assert result.returncode == 0


def test_schedules_that_split_the_backward_pass_are_known_without_building_them():
    built = {kind: build_schedule(kind, 2, 4) for kind in SCHEDULES}
    assert {kind for kind, made in built.items() if made.splits_backward} == set(SPLIT_BACKWARD)
    assert set(SCHEDULES) == set(SUMMARIES)


def test_muon_runs_in_every_layout():
    for ranks, axes in [
        (1, {}),
        (4, {"mesh__dp": 2, "mesh__pp": 2, "train__micro_batches": 2}),
        (2, {"mesh__cp": 2}),
        (2, {"mesh__tp": 2}),
    ]:
        validate(with_changes(Config(), optim__kind="muon", **axes), ranks)


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (2, {"zero__stage": 2}, []),
        (1, {"zero__stage": 2}, ["shards nothing here"]),
        (2, {"zero__stage": 3, "mesh__tp": 2}, ["shards nothing here"]),
        (4, {"zero__stage": 1, "mesh__pp": 2, "train__micro_batches": 4}, []),
        (
            4,
            {"zero__stage": 2, "mesh__pp": 2, "train__micro_batches": 4},
            ["in each of 4 micro-batches; stage 1 reduces"],
        ),
        (4, {"zero__stage": 3, "mesh__pp": 2, "train__micro_batches": 4}, ["gathers every layer twice in each of 4"]),
        (2, {"zero__stage": 2, "zero__keep_gradients": True}, ["the memory and the communication of stage 1"]),
    ],
)
def test_pointless_zero_stages_give_a_warning(ranks, changes, message):
    config = with_changes(Config(), **changes)
    found = find_warnings(config, validate(config, ranks))
    assert len(found) == len(message) and all(part in line for part, line in zip(message, found, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel__schedule": "gpipe"}, "parallel.schedule gpipe has no effect: mesh.pp is 1"),
        ({"parallel__chunks": 2}, "parallel.chunks 2 has no effect: mesh.pp is 1"),
        ({"parallel__sequence": True}, "parallel.sequence true has no effect: mesh.tp is 1"),
        ({"parallel__context": "ulysses"}, "parallel.context ulysses has no effect: mesh.cp is 1"),
        ({"zero__prefetch": False}, "zero.prefetch false has no effect: zero.stage is 0, not 3."),
        ({"optim__momentum": 0.9}, "optim.momentum 0.9 has no effect: optim.kind is adamw; it is for sgd."),
        ({"optim__kind": "sgd", "optim__betas": (0.9, 0.99)}, "optim.betas 0.9 0.99 has no effect: optim.kind is sgd"),
        ({"optim__muon_steps": 4}, "optim.muon-steps 4 has no effect: optim.kind is adamw; it is for muon."),
        ({"optim__decay_fraction": 0.5}, "optim.decay-fraction 0.5 has no effect: optim.schedule is cosine"),
        ({"precision__initial_scale": 8.0}, "precision.initial-scale 8.0 has no effect: the loss is not scaled"),
        ({"comm__gradients": "naive"}, "comm.gradients naive has no effect: dp x cp is 1"),
        (
            {"optim__warmup_steps": 900, "train__steps": 300},
            "optim.warmup-steps is 900 and the run has 300 steps: the learning rate ends at 0.001 and never reaches",
        ),
    ],
)
def test_an_option_without_effect_gives_a_warning(changes, message):
    config = with_changes(Config(), **changes)
    (warning,) = find_warnings(config, validate(config, 1))
    assert warning.startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory__step": 3}, r"memory.step 3 has no effect: .* give --memory FILE. Leave --memory.step out."),
        ({"trace__steps": 3}, r"trace.steps 3 has no effect: .* give --trace FILE. Leave --trace.steps out."),
        (
            {"data__source": "synthetic", "data__path": Path("a.txt")},
            r"data.source synthetic has no effect: data.path is a.txt, .* Leave --data.source out.",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        validate_options(with_changes(Config(), **changes), 1)


def test_options_with_an_effect_give_no_warning():
    pipeline = {"mesh__pp": 2, "parallel__schedule": "gpipe"}
    config = with_changes(Config(), optim__kind="sgd", optim__momentum=0.9, optim__warmup_steps=600, **pipeline)
    assert find_warnings(config, validate(config, 2)) == []
