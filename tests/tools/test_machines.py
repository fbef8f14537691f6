"""Figures of machines agree with those by which the trainer computes its utilization, and are plausible."""

import pytest

from minidist.tools.console import metrics
from minidist.tools.network.machines import MACHINES


@pytest.mark.parametrize("name", MACHINES)
def test_a_machines_figures_are_those_of_the_utilization_and_fall_with_distance(name):
    machine = MACHINES[name]
    assert machine.flops_per_s == metrics.PEAK_FLOPS[name.split(",")[0]]["bfloat16"]
    assert machine.memory_bytes_per_s > machine.node_bytes_per_s > machine.network_bytes_per_s
