"""The memory figure of a log line: the peak since the previous line."""

import torch

from minidist.tools.console.metrics import PeakMemory


def test_peak_memory_is_the_peak_since_the_last_reading():
    memory, size = PeakMemory(torch.device("cpu")), 200 * 2**20
    before = memory.read_and_reset()
    block = torch.ones(size // 4)
    during = memory.read_and_reset()
    del block
    memory.read_and_reset()  # the block was still there when this interval began
    after = memory.read_and_reset()
    assert during > before + 0.9 * size
    assert after < during - 0.9 * size
