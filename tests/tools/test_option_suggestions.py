"""Suggestions for unknown options: names of other trainers, sections, typos."""

import pytest

from minidist.tools.cli import TrainOptions
from minidist.tools.option_suggestions import _NAMES_ELSEWHERE, suggest_options
from minidist.tools.options import option_names
from minidist.tools.simulate.command import SimulateOptions

NAMES = option_names(TrainOptions)


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("zero", ["zero.stage"]),
        ("precision", ["precision.policy"]),
        ("warmup", ["optim.warmup-steps"]),
        ("grad-accum", ["train.micro-batches", "precision.grad-accum"]),
        ("GRAD_ACCUM_STEPS", ["train.micro-batches"]),
        ("bf16", ["precision.policy bf16"]),
        ("fsdp", ["zero.stage 3"]),
        ("no-zero.prefetch", ["zero.no-prefetch"]),
        ("no-prefetch", ["zero.no-prefetch"]),
        ("train.lr", ["optim.lr"]),
        ("model.batch-size", ["train.global-batch"]),
        ("training.steps", ["train.steps", "trace.steps"]),
        ("learning-rte", ["optim.lr"]),
        ("mesh", []),
        ("qqq", []),
    ],
)
def test_an_unknown_option_of_a_run(given, suggested):
    assert suggest_options(given, NAMES) == suggested


def test_a_command_has_its_own_names():
    names = option_names(SimulateOptions)
    assert suggest_options("grad-accum", names) == ["micro-batches"]
    assert suggest_options("bf16", names) == []


def test_names_of_other_trainers_lead_to_options_that_exist():
    elsewhere = [name for names in _NAMES_ELSEWHERE.values() for name in names.split()]
    assert len(elsewhere) == len(set(elsewhere))
    assert not set(elsewhere) & set(NAMES), "these are names of ours"
    assert {option.partition(" ")[0] for option in _NAMES_ELSEWHERE} <= set(NAMES)
