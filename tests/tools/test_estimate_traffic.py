"""`minidist estimate` against real steps: every rank's model states and traffic per group, to the byte."""

from itertools import cycle

import pytest

from minidist.config import Config, PrecisionConfig
from minidist.tools.estimate.estimate import estimate
from minidist.tools.parity.cases import GRADIENTS
from minidist.tools.parity.layouts import Layout, list_layouts
from minidist.tools.parity.plan import possible_switch_values
from tests.helpers.estimate_checks import assert_estimate_is_measured, make_config
from tests.helpers.exhaustive import exhaustive


@pytest.mark.parametrize("world", [1, 2, 3, *exhaustive(4)])
def test_model_states_and_traffic_match_the_estimate_in_every_layout(ranks, world):
    chosen = (
        list_layouts(world)
        if world < 4
        else [each for i, each in enumerate(list_layouts(4)) if not i % 5 or not each.schedule]
    )
    assert_estimate_is_measured(ranks, world, [make_config(layout, world) for layout in chosen])


@pytest.mark.parametrize("world", [2, 3, *exhaustive(4)])
def test_model_states_and_traffic_match_the_estimate_under_zero_and_16_bits(ranks, world):
    """Each layout is combined with some of the ways to shard and some dtypes; parity covers all combinations."""
    chosen, configs = [layout for layout in list_layouts(world) if world < 4 or layout.schedule != "zb-h1"], []
    kinds = cycle([kind for kind in GRADIENTS if kind.startswith("zero")])
    formats, counts, optimizers = (
        cycle(("float64", "bf16", "fp16", "float32")),
        cycle((4, 1, 3)),
        cycle(("adamw", "muon")),
    )
    for layout in [*chosen, *chosen]:
        able = possible_switch_values(layout)
        kind = next(kinds)
        while kind not in able["gradients"] and layout.dp * layout.cp > 1:
            kind = next(kinds)
        values = {"gradients": kind if layout.dp * layout.cp > 1 else "bucketed", "dtype": next(formats)}
        optimizer = next(optimizers)
        values["optimizer"] = optimizer if optimizer in able["optimizer"] else "adamw"
        micro_batches = max(next(counts), 2 if layout.schedule else 1)
        configs.append(make_config(layout, world, micro_batches, **values))
    assert_estimate_is_measured(ranks, world, configs)


SMALL = {"vocab_size": 48, "hidden_size": 24, "intermediate_size": 36, "num_heads": 4, "num_kv_heads": 1}
ODD = {"num_layers": 3, "hidden_size": 10, "vocab_size": 129, "intermediate_size": 7, "num_heads": 5, "num_kv_heads": 1}
SWITCHED = {
    "one by one": (Layout(dp=2, tp=2, sequence=True), {"gradients": "naive"}),
    "buckets that no ring cuts evenly": (Layout(dp=4), {"model": ODD}),
    "untied": (Layout(pp=2, dp=2, schedule="zb-v"), {"tied": False}),
    "tied over two": (Layout(pp=2, cp=2, schedule="1f1b", context="ring"), {}),
    "uneven": (Layout(dp=4), {"data": {"shares": (0.0, 3.0, 1.0, 2.0)}}),
    "fewer samples than parts": (Layout(dp=2, tp=2), {"train": {"global_batch": 9, "micro_batches": 4}}),
    "sgd": (Layout(cp=2, tp=2, context="ulysses", sequence=False), {"optim": {"kind": "sgd", "momentum": 0.0}}),
    "momentum": (Layout(dp=4), {"optim": {"kind": "sgd", "momentum": 0.9}}),
    "one bucket": (Layout(pp=2, tp=2, schedule="gpipe", sequence=True), {"comm": {"bucket_mib": 25.0}}),
    "one head": (Layout(dp=1, tp=4, sequence=False), {"model": SMALL}),
    "one head for the sequence": (Layout(dp=1, tp=4, sequence=True), {"model": SMALL}),
    "one head, ulysses": (Layout(cp=2, tp=2, sequence=True, context="ulysses"), {"model": SMALL}),
}


def test_model_states_and_traffic_match_the_estimate_for_every_switch(ranks):
    assert_estimate_is_measured(ranks, 4, [make_config(layout, 4, **more) for layout, more in SWITCHED.values()])


@pytest.mark.parametrize("policy, dtype", [("fp32", "float32"), ("fp64", "float64"), ("bf16", "bfloat16")])
def test_the_dtype_is_that_of_the_precision(policy, dtype):
    assert estimate(Config(precision=PrecisionConfig(policy=policy)), 1).layout.dtype == dtype
