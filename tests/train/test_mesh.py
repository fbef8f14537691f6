import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.mesh import AXES, Mesh

meshes = st.builds(Mesh, **{axis: st.integers(1, 3) for axis in AXES})
some_axes = st.sets(st.sampled_from(AXES))


@given(meshes)
def test_rank_and_coords_are_inverses(mesh):
    assert [mesh.rank(**mesh.coords(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))


def test_tp_is_innermost_and_pp_outermost():
    mesh = Mesh(pp=2, dp=2, tp=2)
    assert mesh.coords(1) == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert mesh.coords(4) == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}
    assert mesh.ranks(("tp",), 5) == (4, 5)
    assert mesh.ranks(("dp",), 5) == (5, 7)
    assert mesh.ranks(("pp",), 5) == (1, 5)


@given(meshes, some_axes)
def test_groups_are_a_partition_of_all_ranks(mesh, axes):
    groups = mesh.rank_groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {math.prod(mesh.sizes[axis] for axis in axes)}


@given(meshes, some_axes)
def test_ranks_of_a_group_differ_on_its_axes_only(mesh, axes):
    for rank in range(mesh.world_size):
        group = mesh.ranks(axes, rank)
        assert rank in group
        assert list(group) == sorted(group)
        for other, axis in product(group, set(AXES) - axes):
            assert mesh.coords(other)[axis] == mesh.coords(rank)[axis]


def test_an_axis_of_size_one_changes_nothing():
    for rank in range(4):
        assert Mesh(dp=4).ranks(("dp", "tp", "cp"), rank) == Mesh(dp=4).ranks(("dp",), rank) == (0, 1, 2, 3)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_an_invalid_axis_size_is_refused(size):
    with pytest.raises(ValueError, match="dp has size"):
        Mesh(dp=size)


def test_ranks_and_axes_outside_the_mesh_are_refused():
    with pytest.raises(ValueError, match="rank 4 .* ranks are 0 to 3"):
        Mesh(dp=4).coords(4)
    with pytest.raises(ValueError, match="dp=4 .* size 4"):
        Mesh(dp=4).rank(dp=4)
    with pytest.raises(ValueError, match="no axis ep: the axes are pp, dp, cp, tp"):
        Mesh().ranks(("ep",), 0)
