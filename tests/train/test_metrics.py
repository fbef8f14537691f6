"""What a log line says of memory: the peak since the line before."""

import torch

from minidist.train.metrics import PeakMemory


def test_peak_memory_is_of_the_time_since_the_last_reading():
    memory, size = PeakMemory(torch.device("cpu")), 200 * 2**20
    before = memory.read()
    block = torch.ones(size // 4)
    during = memory.read()
    del block
    memory.read()  # the block was still there when this interval began
    after = memory.read()
    assert during > before + 0.9 * size
    assert after < during - 0.9 * size
