"""Threads per rank: CPU affinity, cgroup quotas of both versions, and the user's setting."""

import pytest

from minidist.errors import UserError
from minidist.tools.launch import threads_per_rank, usable_cores


def machine(tmp_path, groups, files):
    """A fake /proc and /sys/fs/cgroup."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return {"proc": tmp_path / "proc", "cgroup": tmp_path / "cgroup"}


def test_without_a_quota_the_affinity_mask_counts(tmp_path):
    fake = machine(tmp_path, "0::/a\n", {"a/cpu.max": "max 100000\n"})
    assert usable_cores(6, **fake) == 6


def test_a_version_2_quota_is_rounded_down(tmp_path):
    fake = machine(tmp_path, "0::/a\n", {"a/cpu.max": "350000 100000\n"})
    assert usable_cores(8, **fake) == 3


def test_the_smallest_quota_on_the_way_to_the_root_counts(tmp_path):
    fake = machine(tmp_path, "0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "500000 100000\n"})
    assert usable_cores(8, **fake) == 2


def test_a_container_sees_its_quota_at_the_root_of_the_mount(tmp_path):
    fake = machine(tmp_path, "0::/path/of/the/host\n", {"cpu.max": "400000 100000\n"})
    assert usable_cores(8, **fake) == 4


def test_a_version_1_quota_counts(tmp_path):
    files = {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"}
    assert usable_cores(8, **machine(tmp_path, "4:memory:/x\n3:cpu,cpuacct:/a\n", files)) == 2


def test_a_version_1_quota_of_minus_one_is_none(tmp_path):
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert usable_cores(8, **machine(tmp_path, "3:cpu:/\n", files)) == 8


def test_half_a_core_is_still_one(tmp_path):
    assert usable_cores(8, **machine(tmp_path, "0::/\n", {"cpu.max": "50000 100000\n"})) == 1


def test_a_machine_without_control_groups_has_its_affinity(tmp_path):
    assert usable_cores(5, proc=tmp_path / "none", cgroup=tmp_path / "none") == 5


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_cores_are_divided_among_the_ranks(cores, ranks, threads):
    assert threads_per_rank(ranks, {}, cores) == threads


@pytest.mark.parametrize("asked", ["3", "3,2"])
def test_the_users_number_of_threads_wins(asked):
    assert threads_per_rank(4, {"OMP_NUM_THREADS": asked}, 4) == 3


@pytest.mark.parametrize("asked", ["many", "0", "-1"])
def test_a_number_of_threads_that_is_none_is_refused_by_name(asked):
    with pytest.raises(UserError, match=f"OMP_NUM_THREADS is '{asked}'"):
        threads_per_rank(2, {"OMP_NUM_THREADS": asked}, 4)
