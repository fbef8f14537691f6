"""The memory limit of a rank: an equal share of what the machine or its container has available."""

import pytest

from minidist.tools.launch.memory_limit import MemoryLimit, available_memory


@pytest.fixture
def system(tmp_path):
    """`system(meminfo kB, most, now)`: folders that stand for /proc and /sys/fs/cgroup; None: no such file."""

    def make(free_kib=None, most=None, now=None):
        for name, text in (
            ("meminfo", None if free_kib is None else f"MemTotal: 9 kB\nMemAvailable:   {free_kib} kB\n"),
            ("memory.max", most),
            ("memory.current", now),
        ):
            if text is not None:
                (tmp_path / name).write_text(f"{text}\n")
        return {"proc": tmp_path, "cgroup": tmp_path}

    return make


def test_the_limit_is_the_machines_available_memory(system):
    assert available_memory(**system(free_kib=2048)) == 2048 << 10


def test_the_container_may_have_less(system):
    assert available_memory(**system(free_kib=2048, most=5000, now=2000)) == 3000
    assert available_memory(**system(free_kib=2048, most=5000, now=7000)) == 0


def test_a_container_without_a_limit_has_what_the_machine_has(system):
    assert available_memory(**system(free_kib=2048, most="max", now=2000)) == 2048 << 10


def test_without_known_memory_there_is_no_limit(system):
    assert available_memory(**system()) is None


@pytest.mark.skipif(available_memory() is None, reason="tells free memory by /proc")
def test_ranks_share_what_is_free():
    two, eight = (MemoryLimit(ranks).extra_bytes for ranks in (2, 8))
    assert two >= eight >= 1 << 30 and 2 * two <= max(available_memory(), 2 << 30)
