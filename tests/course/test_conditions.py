"""Conditions and side effects that every answer is judged by, whatever the exercise: each is broken here once."""

from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist

from exercises import report, side_effects, stubs
from exercises.catalogue import Catalogue
from exercises.testing import Wrong

LOCAL_SGD, RING_ATTENTION = Catalogue()["local_sgd"], Catalogue()["ring_attention"]
CONDITIONS = "holds_under_every_condition"
HEAD = """
import os
import random

import numpy as np
import torch
import torch.distributed as dist

from minidist.comm import Group, all_reduce

CACHE = {}


def local_round(parameters, local_step, steps, weight, group):
    for step in steps:
        local_step(parameters, step)
    merge_replicas(parameters, weight, group)


def rms_distance_from_mean(parameters, group):
    mean = parameters / group.size
    all_reduce(mean, group)
    squares = (parameters - mean).double().square().sum()
    all_reduce(squares, group)
    return float((squares / group.size).sqrt())


def merge_replicas(parameters, weight, group):
"""
WEIGHTS = """
    weights = torch.tensor([weight], dtype=torch.float64)
    all_reduce(weights, group)
    if weights.item() == 0:
        raise ValueError
"""
TOTAL = """
    total = parameters * (weight / weights.item()) if weight else torch.zeros_like(parameters)
    all_reduce(total, group)
"""
COPY = """
    parameters.copy_(total)
"""
RIGHT = HEAD + WEIGHTS + TOTAL + COPY


def answer_with(*lines: str) -> str:
    """Return a right answer that begins with these lines."""
    return HEAD + "".join(f"    {line}\n" for line in lines) + WEIGHTS + TOTAL + COPY


SIDE_EFFECTS = {
    "torch's random state": (answer_with("torch.rand(1)"), "changes the global random state of torch"),
    "Python's random state": (answer_with("random.random()"), "the global random state of Python's random module"),
    "numpy's random state": (answer_with("np.random.rand(1)"), "the global random state of numpy"),
    "a module-level dictionary": (answer_with('CACHE["calls"] = 1'), "keeps data in `CACHE` between calls"),
    "an attribute": (answer_with("merge_replicas.last = weight"), "keeps data in `merge_replicas.last` between calls"),
    "a default argument": (
        RIGHT.replace(
            "def merge_replicas(parameters, weight, group", "def merge_replicas(parameters, weight, group, seen=[]"
        )
        + "    seen.append(weight)\n",
        "keeps data in `the default arguments of merge_replicas` between calls",
    ),
    "the default dtype": (answer_with("torch.set_default_dtype(torch.float64)"), "changes torch's default dtype"),
    "the gradient mode": (answer_with("torch.set_grad_enabled(False)"), "changes torch's gradient mode"),
    "the environment": (answer_with('os.environ["ANSWER"] = "1"'), "changes the environment variables"),
    "the number of threads": (answer_with("torch.set_num_threads(2)"), "changes torch's number of threads"),
    "a process group": (
        answer_with("group.size > 1 and dist.new_group()"),
        "makes process groups and does not destroy",
    ),
    "a process group that is destroyed": (
        answer_with("if group.size > 1:", "    dist.destroy_process_group(dist.new_group())"),
        "makes a process group or a gloo backend of its own: nothing counts what it sends there",
    ),
    "a gloo backend": (
        answer_with(
            "if group.size > 1 and not CACHE:",
            "    CACHE['made'] = True",
            "    store = dist.PrefixStore('own', dist.distributed_c10d._get_default_store())",
            "    dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size())",
        ),
        "makes a process group or a gloo backend of its own: nothing counts what it sends there",
    ),
    "a write to the store": (
        answer_with(
            "if group.size > 1:",
            "    dist.distributed_c10d._get_default_store().set(f'{group.rank}', str(weight))",
        ),
        "merge_replicas writes to a store (set): nothing counts what it sends there",
    ),
    "an operation that nobody waits for": (
        RIGHT + "    global last\n    last = all_reduce(torch.zeros(2), group, async_op=True)\n",
        "keeps data in `last` between calls",
    ),
    "an operation without a wait": (
        answer_with("group.size > 1 and dist.all_reduce(torch.zeros(2), async_op=True)"),
        "never waits for its all_reduce of shape (2,)",
    ),
}


@pytest.mark.parametrize("name", SIDE_EFFECTS)
def test_side_effects_are_named(check_answer, name):
    text, told = SIDE_EFFECTS[name]
    verdict = check_answer(LOCAL_SGD, text, only=["sends_the_parameters_once", "weighted_mean_of_all_replicas"])
    assert verdict.reported is not None
    message = " ".join(report.format_finding(verdict.reported.finding))
    assert told in message, message


def test_an_answer_without_side_effects_passes_every_test(check_answer):
    assert check_answer(LOCAL_SGD, RIGHT).passed


def test_the_hash_of_a_text_differs_between_ranks_as_between_interpreters(check_answer):
    text = answer_with('if hash("seed") % 1000 != hash("seed") % 1000: raise ValueError')
    assert check_answer(LOCAL_SGD, text, only=["weighted_mean_of_all_replicas"]).passed  # equal on one rank
    text = answer_with('weight = weight + hash("seed") % 1000')
    finding = check_answer(LOCAL_SGD, text, only=["weighted_mean_of_all_replicas"]).reported.finding
    assert finding.what.startswith("the parameters")


def test_the_order_of_a_set_of_texts_differs_between_ranks_as_between_interpreters(check_answer):
    text = answer_with('weight = weight + ["seed", "step"].index([*{"seed", "step"}][0])')
    finding = check_answer(LOCAL_SGD, text, only=["weighted_mean_of_all_replicas"]).reported.finding
    assert finding.what.startswith("the parameters")


WRONG = {
    "float32 in between": (
        RIGHT.replace(
            "all_reduce(total, group)",
            "total = total.float() if group.size > 1 else total\n    all_reduce(total, group)",
        ),
        "the dtype of the tensors that your code sends to other ranks",
    ),
    "float32 on one rank": (
        RIGHT.replace("all_reduce(total, group)", "all_reduce(total, group)\n    total = total.float()"),
        "the result, at [1]",
    ),
    "the ranks of the world": (
        RIGHT.replace("all_reduce(total, group)", "dist.is_initialized() and dist.all_reduce(total)"),
        "the result, at [0]",
    ),
    "at most sixteen thousand elements": (
        RIGHT.replace("copy_(total)", "copy_(total * (torch.arange(parameters.numel()) < 1 << 14))"),
        "the result, at [16384]",
    ),
    "NaN taken for 0": (
        RIGHT.replace("total = parameters", "total = parameters.nan_to_num()"),
        "nan",
    ),
    "replicas of different bits": (
        RIGHT + "    if group.rank:\n        parameters *= 1 + torch.finfo(parameters.dtype).eps\n",
        "end with different bits",
    ),
    "memory around a slice": (
        RIGHT + "    if parameters.storage_offset():\n        parameters.as_strided((1,), (1,), 0).zero_()\n",
        "writes outside parameters, which is a slice",
    ),
    "zeros taken for no data": (
        RIGHT.replace(
            "if weight else torch.zeros_like(parameters)",
            "if weight and parameters.any() else torch.full_like(parameters, weight)",
        ),
        "zeros on one rank",
    ),
    "a result that requires gradients": (
        RIGHT + "    parameters.set_(parameters.detach().clone()).requires_grad_()\n",
        "the result requires gradients, and no argument does",
    ),
    "contiguous tensors only": (
        RIGHT.replace("parameters.copy_(total)", "parameters.view(-1).copy_(total.view(-1))"),
        "view size is not compatible",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_conditions_catch_what_other_tests_let_pass(check_answer, name):
    text, told = WRONG[name]
    verdict = check_answer(LOCAL_SGD, text, only=[CONDITIONS])
    assert verdict.reported is not None
    message = " ".join(report.format_finding(verdict.reported.finding))
    assert told in message, message


ONLY_BY_CONDITIONS = {  # wrong answers to `ring_attention`
    "wrong_all_blocks_kept": "the peak of memory during the call grows, in bytes",
    "wrong_queries_scaled_in_place": "query, key and value are one tensor",
    "wrong_result_in_a_longer_tensor": "the memory that is kept after the call grows, in bytes",
}


@pytest.mark.parametrize("name", ONLY_BY_CONDITIONS)
def test_a_condition_alone_refuses_what_the_own_tests_of_an_exercise_let_pass(check_answer, name):
    verdict = check_answer(RING_ATTENTION, stubs.generate_answer(RING_ATTENTION, name))
    failed = [result for result in verdict.results if result.finding and result.finding.kind != "skipped"]
    assert [result.id for result in failed] == [CONDITIONS]
    message = " ".join(report.format_finding(failed[0].finding))
    assert ONLY_BY_CONDITIONS[name] in message, message


GROWN = {  # wrong answers whose memory grows: in backward, and in a model that the declared result leaves out
    ("recomputed_block", "wrong_keeps_everything"): "the peak of memory during the call grows, in bytes",
    ("master_weights", "wrong_values_kept_too"): "the memory that is kept after the call grows, in bytes",
}


@pytest.mark.parametrize(("name", "answer"), GROWN)
def test_memory_grows_no_more_than_is_declared(check_answer, name, answer):
    exercise = Catalogue()[name]
    verdict = check_answer(exercise, stubs.generate_answer(exercise, answer), only=[CONDITIONS])
    assert verdict.reported is not None
    message = " ".join(report.format_finding(verdict.reported.finding))
    assert GROWN[name, answer] in message, message


def test_a_write_to_a_store_is_seen_in_every_call_of_a_test(monkeypatch):
    for name in side_effects._STORE_WRITES:  # so that they are as before when the test has ended
        monkeypatch.setattr(dist.Store, name, getattr(dist.Store, name))
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__)
    monkeypatch.setattr(side_effects, "_CHANNELS", side_effects._UncountedChannels())
    module, store = ModuleType("answer"), dist.HashStore()
    exec("def write(store, call):\n    call == 150 and store.set('key', 'value')\n", vars(module))
    effects = side_effects.SideEffects(module, ["write"], SimpleNamespace(records=[]))
    for call in range(150):
        module.write(store, call)
    store.set("key", "value")  # by the test
    effects.check()
    module.write(store, 150)
    with pytest.raises(Wrong, match="write writes to a store \\(set\\)"):
        effects.check()
