"""Tests of process_groups: the reference asks for each pair of ranks whether they belong to one group."""

import itertools
import math

from exercises.interpreters import interpreter
from exercises.testing import Wrong, expect, show, test
from minidist.comm import GroupSpec
from minidist.config import Config, ConsistencyConfig
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig

AXES = ("tp", "cp", "dp", "pp")  # the axis that changes fastest first


def coordinates(rank, sizes):
    """The coordinates of a rank by axis."""
    found = {}
    for axis in AXES:
        found[axis] = rank % sizes[axis]
        rank //= sizes[axis]
    return found


def keys_of(rank, sizes, kv_heads, tied, replicas):
    """What the ranks of each group of this rank have in common, by the group's name."""
    at = coordinates(rank, sizes)
    per_replica = sizes["dp"] // replicas
    replica, inside = divmod(at["dp"], per_replica)
    keys = {"grads": (at["pp"], at["tp"], replica)}
    if replicas > 1:
        keys["replica"] = (replica,)
        keys["outer"] = (at["pp"], inside, at["cp"], at["tp"])
    if sizes["tp"] > 1:
        keys["tensor"] = (at["pp"], at["dp"], at["cp"])
    if sizes["tp"] > kv_heads:
        keys["heads"] = (at["pp"], at["dp"], at["cp"], at["tp"] * kv_heads // sizes["tp"])
    if sizes["cp"] > 1:
        keys["context"] = (at["pp"], at["dp"], at["tp"])
    if sizes["pp"] > 1:
        keys["activations"] = keys["gradients"] = (at["dp"], at["cp"], at["tp"])
        if tied and at["pp"] in (0, sizes["pp"] - 1):
            keys["tied"] = (at["dp"], at["cp"], at["tp"])
    return keys


def expected_groups(sizes, kv_heads, tied, replicas):
    """The groups of each name, each a tuple of ascending ranks."""
    found = {}
    for rank in range(sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"]):
        for name, key in keys_of(rank, sizes, kv_heads, tied, replicas).items():
            found.setdefault(name, {}).setdefault(key, []).append(rank)
    return {name: sorted(map(tuple, groups.values())) for name, groups in found.items()}


def check_layout(
    answer, pp=1, dp=1, cp=1, tp=1, kv_heads=24, tied=False, replicas=1, mode="local", unmerged="synchronous"
):
    """Compare names and groups of one layout with the reference.

    replicas: 0 if each dp coordinate is a replica. mode: of replicas; unmerged: the mode without replicas.
    """
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    merging = ConsistencyConfig(mode=mode, replicas=replicas or None) if replicas != 1 else ConsistencyConfig(unmerged)
    model = ModelConfig(num_heads=24, num_kv_heads=kv_heads, tie_embeddings=tied)
    mesh = Mesh(**sizes)
    case = f"mesh {' x '.join(f'{axis} {size}' for axis, size in sizes.items() if size > 1) or 'of one rank'}"
    case += f", {kv_heads} key-value heads" * (kv_heads < 24) + ", tied embeddings" * tied
    case += f", {mode}, {replicas or dp} replicas" if replicas != 1 else f", {unmerged}" * (unmerged != "synchronous")
    config = Config(model=model, consistency=merging)
    specs = answer.group_specs(mesh, config)
    if type(specs) is not list or any(type(spec) is not GroupSpec for spec in specs):
        raise Wrong("type", "group_specs must return a list", "a list of GroupSpec", show(specs), case=case)
    expected = expected_groups(sizes, kv_heads, tied, replicas or dp)
    expect("the names of all specs, sorted", sorted(spec.name for spec in specs), sorted(expected), case=case)
    with interpreter(1):
        names = [spec.name for spec in answer.group_specs(mesh, config)]
    what = "the names on another rank, in order (the hashes of texts, and so the order of a set, differ between ranks)"
    expect(what, names, [spec.name for spec in specs], case=case)
    for spec in specs:
        groups = sorted(map(tuple, spec.rank_groups(mesh)))
        expect(f'the groups of "{spec.name}"', groups, expected[spec.name], case=case)


@test(points=4)
def one_axis(answer):
    """Meshes with one axis: an axis of size 1 has no group, but "grads" exists on every mesh."""
    check_layout(answer)
    for axis in ("dp", "cp", "tp", "pp"):
        for size in (2, 3, 4):
            check_layout(answer, **{axis: size})


@test(points=5)
def several_axes(answer):
    """Meshes with two to four axes, also of sizes that are no powers of two, and with all kinds of groups at once."""
    for sizes in itertools.product((1, 2, 3), repeat=4):
        layout = dict(zip(("pp", "dp", "cp", "tp"), sizes, strict=True))
        check_layout(answer, **layout)
        if math.prod(sizes) <= 24:
            check_layout(answer, **layout, kv_heads=1, tied=True, replicas=0)


@test(points=3)
def few_key_value_heads(answer):
    """ "heads" has the tensor-parallel ranks with one key-value head, if there are fewer heads than ranks."""
    for tp, kv_heads in (
        (2, 2),
        (2, 1),
        (4, 4),
        (4, 2),
        (4, 1),
        (8, 4),
        (8, 2),
        (8, 1),
        (3, 1),
        (3, 3),
        (6, 2),
        (6, 12),
    ):
        check_layout(answer, tp=tp, kv_heads=kv_heads)
    for tp, kv_heads in ((2, 1), (4, 2)):
        check_layout(answer, pp=2, dp=2, tp=tp, kv_heads=kv_heads)
        check_layout(answer, cp=2, tp=tp, kv_heads=kv_heads)


@test(points=3)
def tied_embeddings(answer):
    """ "tied" has the first and the last stage; the stages between them have no such group."""
    check_layout(answer, dp=2, tp=2, tied=True)
    for pp in (2, 3, 4):
        check_layout(answer, pp=pp, tied=True)
        check_layout(answer, pp=pp, dp=2, tied=True)
        check_layout(answer, pp=pp, cp=2, tp=2, tied=True)


@test(points=5)
def separate_replicas(answer):
    """Replicas that train separately: "grads" within one, "replica" its ranks, "outer" the ranks that merge."""
    for mode in ("central", "asynchronous", "stale"):
        check_layout(answer, dp=4, unmerged=mode)  # num_replicas is 1
    for mode in ("local", "diloco", "gossip"):
        for dp in (1, 2, 3, 4):
            check_layout(answer, dp=dp, replicas=0, mode=mode)
        check_layout(answer, dp=4, replicas=2, mode=mode)
    for dp, replicas in ((2, 2), (4, 2), (6, 2), (6, 3), (4, 4)):
        check_layout(answer, dp=dp, replicas=replicas)
        check_layout(answer, dp=dp, tp=2, kv_heads=1, replicas=replicas)
        check_layout(answer, pp=2, dp=dp, replicas=replicas, tied=True)
        check_layout(answer, dp=dp, cp=2, replicas=replicas)
