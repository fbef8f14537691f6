"""A layout that cannot run is refused before anything starts, with the numbers and the nearest that works."""

import subprocess
import sys

import pytest

from minidist.config import Config
from minidist.errors import UserError
from minidist.fit import check, pipeline, remarks
from tests.helpers.small_run import changed


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (
            8,
            {"mesh__pp": 8},
            r"mesh.pp is 8: 8 stages need a layer each, and the model has 4: give --mesh.pp 4, or --model.num-layers 8",
        ),
        (
            4,
            {"mesh__pp": 4, "parallel__schedule": "interleaved", "train__micro_batches": 4},
            r"4 stages x 2 chunks = 8 parts need a layer each, and the model has 4: give --mesh.pp 2, or .*layers 8",
        ),
        (
            2,
            {"mesh__pp": 2, "parallel__schedule": "interleaved", "parallel__chunks": 3, "train__micro_batches": 2},
            r"2 stages x 3 chunks = 6 parts need a layer each, and the model has 4: give --mesh.pp 1, or .*layers 6",
        ),
        (
            2,
            {"mesh__pp": 2, "parallel__schedule": "zb-h2", "train__micro_batches": 2},
            r"zb-h2 has 2 x 2 stages - 1 = 3 micro-batches in flight, and was given 2: give 3 micro-batches or more",
        ),
        (
            2,
            {"mesh__pp": 2, "parallel__schedule": "interleaved", "train__micro_batches": 5},
            r"5 micro-batches are no multiple of 2 stages. Give 4 or 6 micro-batches, or take 1f1b",
        ),
        (2, {"mesh__pp": 2, "parallel__chunks": 2}, r"1f1b has 1 chunk a stage, and was given 2: leave the chunks out"),
        (
            2,
            {"mesh__tp": 2, "optim__kind": "muon"},
            r"optim.kind is muon and mesh.tp is 2: .* needs all of it.* Give --mesh.tp 1, or --optim.kind adamw\.$",
        ),
        (2, {"optim__muon_steps": 0}, r"optim.muon-steps is 0; it must be from 1 to 20: change --optim.muon-steps\.$"),
        (2, {"optim__muon_momentum": 1.5}, r"optim.muon-momentum is 1.5; it must be from 0 to 1: change"),
        (2, {"optim__muon_lr_ratio": 0.0}, r"optim.muon-lr-ratio is 0.0; it must be above 0: change"),
        (
            4,
            {"zero__stage": 1, "zero__shard": 3},
            r"zero.shard is 3: dp=4 x cp=1 = 4 ranks cannot be cut into sets of 3 .* --zero.shard 1 or 2 or 4\.",
        ),
        (
            8,
            {"zero__stage": 3, "zero__shard": 2, "mesh__cp": 4},
            r"dp=2 x cp=4 = 8 ranks cannot be cut into sets of 2 .* Possible: --zero.shard 4 or 8\.",
        ),
        (
            2,
            {"zero__shard": 2},
            r"zero.shard is 2, and with zero.stage 0 nothing is shared out: give --zero.stage 1, 2",
        ),
        (
            2,
            {"zero__stage": 1, "zero__keep_gradients": True},
            r"zero.keep-gradients is for stage 2, and zero.stage is 1: .* Leave --zero.keep-gradients out\.",
        ),
        (
            2,
            {"zero__stage": 1, "comm__algorithm": "ring"},
            r"comm.algorithm is ring, an all-reduce, and zero.stage 1 sends .* or give --zero.stage 0\.",
        ),
        (
            2,
            {"precision__policy": "bf16", "comm__gradients": "naive"},
            r"comm.gradients is naive, which is for zero.stage 0 \(here 0\) and .* \(precision.policy bf16\)",
        ),
        (
            2,
            {"zero__offload": True, "device": "cpu"},
            r"zero.offload moves states from a GPU to the host, and device is",
        ),
        (2, {"precision__policy": "fp16", "precision__loss_scale": "none"}, r"precision.loss-scale is none, and grad"),
        (3, {"mesh__tp": 3}, r"model.num_heads=4 cannot be shared equally by tp=3 ranks; possible tp: 1, 2, 4"),
        (
            3,
            {"mesh__tp": 3, "model__num_heads": 6, "model__hidden_size": 96},
            r"model.vocab_size=256 cannot be shared equally by tp=3 ranks; possible tp: 1, 2, 4, 8; or vocab_size=258",
        ),
        (
            2,
            {"mesh__cp": 2, "data__seq_len": 66},
            r"data.seq_len=66 cannot be shared by cp=2 ranks in the zigzag layout.*possible cp: 1, 3.*or seq_len=68\.",
        ),
        (
            2,
            {"mesh__cp": 2, "parallel__context": "ulysses", "data__seq_len": 65},
            r"data.seq_len=65 cannot be shared by cp=2 ranks in the contiguous layout.*or seq_len=66\.",
        ),
        (
            4,
            {"mesh__cp": 2, "mesh__tp": 2, "model__num_heads": 2, "parallel__context": "ulysses"},
            r"model.num_heads=2 over tp=2 leaves 1 query heads, which cp=2 ranks cannot share equally in ulysses",
        ),
        (
            2,
            {"mesh__tp": 2, "parallel__sequence": True, "data__seq_len": 65},
            r"data.seq_len=65 over cp=1 leaves 65 tokens a rank, which tp=2 ranks cannot share .*seq_len=66 would",
        ),
    ],
)
def test_a_layout_that_cannot_run_is_refused_with_its_numbers(ranks, changes, message):
    with pytest.raises(UserError, match=message):
        check(changed(Config(), **changes), ranks)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (8, {"mesh__dp": 2, "mesh__pp": 2, "mesh__tp": 2}),
        (2, {"mesh__tp": 2, "data__seq_len": 65}),  # the sequence is not shared
        (2, {"parallel__schedule": "zb-h2", "parallel__chunks": 7}),  # of a pipeline that is not there
        (4, {"mesh__tp": 4}),  # two key and value heads for four ranks
        (4, {"mesh__cp": 2, "mesh__tp": 2, "parallel__sequence": True, "data__seq_len": 4}),
    ],
)
def test_what_can_run_is_not_refused(ranks, changes):
    assert check(changed(Config(), **changes), ranks).world_size == ranks


def test_without_a_pipeline_there_is_no_schedule():
    config = Config()
    assert pipeline(config, check(config, 3)) is None
    staged = changed(config, mesh__pp=2, train__micro_batches=3)
    assert pipeline(staged, check(staged, 4)).micro_batches == 3


def test_whoever_checks_does_not_wait_for_torch():
    ran = subprocess.run(
        [sys.executable, "-c", "import sys, minidist.fit; sys.exit('torch' in sys.modules)"], timeout=60, check=False
    )
    assert ran.returncode == 0


def test_muon_runs_where_matrices_are_whole():
    for ranks, axes in [(1, {}), (4, {"mesh__dp": 2, "mesh__pp": 2, "train__micro_batches": 2}), (2, {"mesh__cp": 2})]:
        check(changed(Config(), optim__kind="muon", **axes), ranks)


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        (2, {"zero__stage": 2}, []),
        (1, {"zero__stage": 2}, ["nothing to share out"]),
        (2, {"zero__stage": 3, "mesh__tp": 2}, ["nothing to share out"]),
        (4, {"zero__stage": 1, "mesh__pp": 2, "train__micro_batches": 4}, []),
        (
            4,
            {"zero__stage": 2, "mesh__pp": 2, "train__micro_batches": 4},
            ["in each of 4 micro-batches; stage 1 sends"],
        ),
        (4, {"zero__stage": 3, "mesh__pp": 2, "train__micro_batches": 4}, ["gathers every layer twice in each of 4"]),
        (2, {"zero__stage": 2, "zero__keep_gradients": True}, ["holds and sends what stage 1 does"]),
    ],
)
def test_what_is_of_little_use_is_said_and_not_refused(ranks, changes, said):
    config = changed(Config(), **changes)
    found = remarks(config, check(config, ranks))
    assert len(found) == len(said) and all(part in line for part, line in zip(said, found, strict=True))
