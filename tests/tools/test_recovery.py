"""Live recovery: ranks are killed with SIGKILL, and the run equals the one in which nobody died."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch

from minidist.checkpoint.load import load_checkpoint, read_index
from minidist.checkpoint.shards import DTYPES, TensorShard
from minidist.config import FaultConfig, MeshConfig
from minidist.parameters import Box
from minidist.tools.launch import RankFailure
from minidist.tools.recovery.live_recovery import ReplicaState, _describe_replicas, find_replicas_left
from minidist.train.checkpoint_state import checkpoint_shards, copy_first_replica, renumber_replica
from minidist.train.step_result import StepResult
from tests.helpers.recovery_cases import FP64, Kill, Script, recovery_config, run_script
from tests.helpers.small_run import (
    DEADLINE_S,
    Stop,
    make_trainer,
    read_checkpoint,
    read_metrics,
    train_small,
    with_changes,
)

# `make test` runs the tests that are not marked `exhaustive`. What the ranks agree on is tested without processes in
# test_membership.

# Other numbers of replicas sum the same gradients in another order: a few roundings per step, of 1.1e-16 each in
# float64, over 8 steps. In float32 it is 6e-8 each.
TOLERANCE = {"fp64": 1e-12, "fp32": 2e-6}
LAYOUTS = {
    "dp": {},
    "tp x dp": {"mesh": MeshConfig(tp=2)},
    "pp x dp": {"mesh": MeshConfig(pp=2), "model__num_layers": 2},
    "zero 1": {"zero__stage": 1},
    "zero 3": {"zero__stage": 3},
    "zero 1 x tp": {"zero__stage": 1, "mesh": MeshConfig(tp=2)},
    "tp x pp": {"mesh": MeshConfig(tp=2, pp=2), "model__num_layers": 2},
    "sgd with momentum, zero 2": {"zero__stage": 2, "optim__momentum": 0.9},
}


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    """`undisturbed(config)`: the folder of a run with the same configuration in which nobody dies; each runs once."""
    folders = {}

    def run(config):
        plain = with_changes(config, folder=None, data=replace(config.data, path=None), fault=FaultConfig())
        key = repr(with_changes(plain, checkpoint=replace(plain.checkpoint, every=0)))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("plain")
            plain = with_changes(plain, folder=folders[key] / "run", data=config.data)
            server.run(train_small, 4, (plain,), deadline_s=DEADLINE_S)
        return folders[key] / "run"

    return run


def check_equals_undisturbed(undisturbed, config):
    """Every step is in the metrics once, and losses, norms and final parameters are those of a run without deaths."""
    plain = undisturbed(config)
    tolerance = TOLERANCE[config.precision.policy]
    rows = [[row for row in read_metrics(folder) if "loss" in row] for folder in (config.folder, plain)]
    assert [row["step"] for row in rows[0]] == list(range(1, config.train.steps + 1))
    for mine, expected in zip(*rows, strict=True):
        for name in ("loss", "grad_norm", "lr", "tokens"):
            assert mine[name] == pytest.approx(expected[name], rel=tolerance), (mine["step"], name)
    saved, expected = (read_checkpoint(folder, config.train.steps) for folder in (config.folder, plain))
    assembled, wanted = _assemble(saved), _assemble(expected)
    assert assembled.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(assembled[name], tensor, rtol=tolerance * 10, atol=tolerance), name


def _assemble(saved):
    """Join the boxes of each tensor, which depend on the layout, in order: {name: all values, flat and sorted}."""
    values = {}
    for key, tensor in saved.items():
        values.setdefault(key.split("[")[0], []).append(tensor.flatten().double())
    return {name: torch.cat(parts).sort().values for name, parts in values.items()}


def notes(result):
    return "\n".join(result.output)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_others_go_on_and_admit_a_new_rank(server, undisturbed, tmp_path, backend):
    config = recovery_config(tmp_path / "run", **FP64)
    result = run_script(
        server, config, Script((Kill(2, 3),), wait_at=(5,), are_replacements_late=True), backend=backend
    )
    check_equals_undisturbed(undisturbed, config)
    assert [value["ranks"] for value in result.values] == [4] * 4  # the last generation is complete again
    assert sorted(value["member"] for value in result.values) == [0, 1, 3, 4]
    assert len({value["digest"] for value in result.values}) == 1
    text = notes(result)
    assert "died in step 3: killed by SIGKILL\n3 ranks go on, mesh pp=1 x dp=3 x cp=1 x tp=1, " in text
    assert "with the state after step 2 from the live tensors of ranks 0-2: no step is lost\n" in text
    assert "\nstep 3 was completed " in text and "s after the failure" in text
    assert "joins\n4 ranks go on, mesh pp=1 x dp=4 x cp=1 x tp=1, " in text
    rows = [row["time"] for row in read_metrics(config.folder) if "time" in row]
    assert rows[-1]["lost"]["live recovery"] > 0 and not {"between attempts", "resuming"} & set(rows[-1]["lost"])
    wall_s = [row["useful_s"] + sum(row["lost"].values()) for row in rows]  # its time is added once
    assert wall_s[-1] - wall_s[0] == pytest.approx(rows[-1]["at"] - rows[0]["at"])


SCRIPTS = {
    "rank 0": Script((Kill(0, 3),), wait_at=(6,)),
    "in forward": Script((Kill(1, 4, "forward"),)),
    "after the agreement": Script((Kill(3, 4, "agreed"),)),
    "before the report": Script((Kill(0, 4, "report"),)),
    "in the first step": Script((Kill(1, 1),)),
    "two at once": Script((Kill(2, 3), Kill(3, 3, "forward"))),
    "one after the other": Script((Kill(1, 3), Kill(2, 4))),
    "while recovering": Script((Kill(1, 3), Kill(3, 3, "restore"))),
    "the replacement": Script((Kill(1, 3), Kill(4, 6)), wait_at=(5,)),
}
LAYOUT_SCRIPTS = [
    *(("dp", name) for name in SCRIPTS),
    *(("tp x dp", name) for name in ("rank 0", "two at once", "after the agreement")),
    *(("zero 1", name) for name in ("rank 0", "in the first step", "while recovering")),
    *(("zero 3", name) for name in ("in forward", "after the agreement")),
    *((layout, "rank 0") for layout in ("pp x dp", "zero 1 x tp", "tp x pp", "sgd with momentum, zero 2")),
]
QUICK = (("dp", "while recovering"), ("tp x dp", "two at once"), ("zero 3", "in forward"), ("tp x pp", "rank 0"))


@pytest.mark.parametrize(
    ("layout", "script"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.exhaustive) for case in LAYOUT_SCRIPTS],
)
def test_every_layout_survives(server, undisturbed, tmp_path, layout, script):
    backend = "shm" if (len(layout) + len(script)) % 2 else "gloo"  # each about half
    config = recovery_config(tmp_path / "run", **FP64, **LAYOUTS[layout])
    run_script(server, config, SCRIPTS[script], backend=backend, max_restarts=4)
    check_equals_undisturbed(undisturbed, config)


def test_a_step_that_rank_0_has_not_recorded_when_it_dies_is_recorded_by_the_others(server, tmp_path):
    """Although they have completed it, with their own part of the report."""
    config = recovery_config(tmp_path / "run", memory_every=0)
    run_script(server, config, Script((Kill(0, 4, "row"),)), ranks=2)
    assert [row["step"] for row in read_metrics(config.folder) if "loss" in row] == list(range(1, 9))


@pytest.mark.exhaustive
def test_float32_differs_by_roundings_only(server, undisturbed, tmp_path):
    config = recovery_config(tmp_path / "run", optim__lr=0.1)
    run_script(server, config, Script((Kill(1, 3),)), backend="shm")
    check_equals_undisturbed(undisturbed, config)


@pytest.mark.exhaustive
def test_a_decision_that_reached_one_rank_is_carried_out_by_all(server, undisturbed, tmp_path):
    """Ranks 0 and 3 have updated in step 4, ranks 1 and 2 have not: of two tensor-parallel shards, neither step is
    complete, and the ranks that are behind must still update."""
    config = recovery_config(tmp_path / "run", **FP64, **LAYOUTS["tp x dp"], memory_every=0)
    script = Script((Kill(0, 4, "agreed"),), lost_replies=((1, 4), (2, 4)), are_replacements_late=True)
    result = run_script(server, config, script)
    check_equals_undisturbed(undisturbed, config)
    assert "with the state after step 4 from the live tensors of ranks 0-1: no step is lost" in notes(result)


@pytest.mark.exhaustive
def test_copies_bound_what_a_death_loses(server, undisturbed, tmp_path):
    config = recovery_config(tmp_path / "run", **FP64, **LAYOUTS["zero 1"], memory_every=3)
    result = run_script(server, config, Script((Kill(2, 6),)))
    check_equals_undisturbed(undisturbed, config)
    assert "with the state after step 3 from the own copies of ranks 0-2 and the partner copies of" in notes(result)
    assert ": 2 completed steps are repeated" in notes(result)


@pytest.mark.exhaustive
def test_without_copies_the_newest_checkpoint_is_used(server, undisturbed, tmp_path):
    config = recovery_config(
        tmp_path / "run", **FP64, **LAYOUTS["zero 1"], memory_every=0, checkpoint__every=2, checkpoint__background=False
    )
    result = run_script(server, config, Script((Kill(2, 6),)))
    check_equals_undisturbed(undisturbed, config)
    assert "from the newest checkpoint, or from the start: the ranks left hold no complete state" in notes(result)


@pytest.mark.exhaustive
def test_all_ranks_die(server, undisturbed, tmp_path):
    config = recovery_config(tmp_path / "run", **FP64, checkpoint__every=2, checkpoint__background=False)
    run_script(server, config, Script(tuple(Kill(member, 4, "forward") for member in range(4))), max_restarts=4)
    check_equals_undisturbed(undisturbed, config)


@pytest.mark.exhaustive
def test_the_run_goes_on_without_replacement_when_the_restarts_are_used_up(server, undisturbed, tmp_path):
    config = recovery_config(tmp_path / "run", **FP64)
    result = run_script(server, config, Script((Kill(1, 3), Kill(2, 5))), max_restarts=0)
    check_equals_undisturbed(undisturbed, config)
    assert [value and value["ranks"] for value in result.values] == [2, None, None, 2]


@pytest.mark.exhaustive
def test_a_mesh_that_cannot_be_filled_ends_the_run(server, tmp_path):
    config = recovery_config(tmp_path / "run", **LAYOUTS["tp x pp"])
    with pytest.raises(RankFailure, match="rank 1 died: killed by SIGKILL"):
        run_script(server, config, Script((Kill(1, 3),)), max_restarts=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("deaths", [(), (Kill(1, 3),)])
def test_a_deadlock_ends_the_run_before_and_after_a_death(server, tmp_path, deaths):
    config = recovery_config(tmp_path / "run")
    with pytest.raises(RankFailure, match="rank 0 waits for rank 1 to launch send #1 to rank 0 of 'control'"):
        run_script(server, config, Script(deaths, deadlock_at=6))


@pytest.mark.exhaustive
def test_a_run_without_deaths_is_bit_equal(server, undisturbed, tmp_path):
    config = recovery_config(tmp_path / "run", **LAYOUTS["zero 1"])
    run_script(server, config, Script())
    saved, expected = read_checkpoint(config.folder, 8), read_checkpoint(undisturbed(config), 8)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


@pytest.mark.exhaustive
def test_a_central_server_that_dies_is_replaced(server, undisturbed, tmp_path):
    config = recovery_config(tmp_path / "run", **FP64, consistency__mode="central")
    run_script(server, config, Script((Kill(1, 3),), are_survivors_patient=True), backend="shm")
    check_equals_undisturbed(undisturbed, config)


# Replicas that differ between merges.
MODES = {
    "local": {"consistency__mode": "local", "consistency__h": 4},
    "diloco": {"consistency__mode": "diloco", "consistency__h": 4, "consistency__outer_momentum": 0.9},
    "gossip": {"consistency__mode": "gossip", "consistency__h": 4},
    "diloco in int8": {"consistency__mode": "diloco", "consistency__h": 4, "consistency__exchange": "int8"},
    "local, in fragments": {"consistency__mode": "local", "consistency__h": 4, "consistency__fragments": 2}
    | {"model__num_layers": 2},
    "diloco, zero 1 inside": {"consistency__mode": "diloco", "consistency__h": 4, "zero__stage": 1}
    | {"consistency__replicas": 2},
}


def continue_as(world, config, path, replicas, is_merge_due):
    """Go on with the state at `path`: number i of the replicas begins as replica `replicas[i]` there, or as a copy of
    replica 0 if it is None. is_merge_due: whether that state is to be merged first."""
    torch.set_num_threads(1)
    with contextlib.closing(make_trainer(world, config)) as trainer:
        merger, number = trainer.engine.merger, trainer.engine.merger.replica
        source = replicas[0] if replicas[number] is None else replicas[number]
        shards = list(renumber_replica(checkpoint_shards(trainer.engine), number, source))
        index = read_index(path)
        needed = set().union(*trainer.all_gather_object({shard.name for shard in shards}))
        for name, saved in index.tensors.items():
            if name not in needed:  # of a replica that does not go on
                values = torch.empty(saved.shape, dtype=DTYPES[saved.dtype_name])
                shards.append(TensorShard(name, saved.shape, Box.whole(saved.shape), values))
        load_checkpoint(path, shards, trainer.all_gather_object, world.rank)
        trainer.after_load(index.state)
        if replicas[number] is None:
            merger.forget_progress()
        step = trainer.progress.step
        if is_merge_due:
            merger.unmerged = merger.due_fragments(step - 1)
            trainer.engine.finish_merge(step - 1, StepResult(1.0, 1.0, 1.0, True, True, False))
        trainer.run(Stop())


REPLICA_CASES = {
    # Whether a new process is there at once, and the replicas that then go on.
    "one less": (Kill(1, 3), False, (0, 2, 3)),
    "a new one": (Kill(1, 3), True, (0, 2, 3, None)),
    "in a merge": (Kill(1, 4, "merge"), False, (0, 2, 3)),
    "replica 0": (Kill(0, 3, "forward"), True, (1, 2, 3, None)),
}


def _marks_of_case(mode, case):
    return () if (mode, case) in (("diloco", "a new one"), ("local", "in a merge")) else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        pytest.param(mode, case, marks=_marks_of_case(mode, case))
        for mode in MODES
        for case in REPLICA_CASES
        # With fragments, no run with another h has the state before this merge: see the next test. The other one: see
        # the test after it.
        if case != "in a merge" or mode not in ("local, in fragments", "diloco, zero 1 inside")
    ],
)
def test_the_other_replicas_go_on_with_their_own_state(server, tmp_path, mode, case):
    """The replica that has died is missing in the next merge; the run equals one with only the others from then on."""
    kill, has_new, left = REPLICA_CASES[case]
    if "inside" in mode:  # two replicas of two ranks; three ranks would be replicas of one rank
        has_new, left = True, (1, None)
    config = recovery_config(tmp_path / "run", **FP64, **MODES[mode])
    result = run_script(
        server, config, Script((kill,), are_survivors_patient=has_new), backend="shm", max_restarts=int(has_new)
    )
    rows = [row["step"] for row in read_metrics(config.folder) if "loss" in row]
    assert rows == list(range(1, 9)) and ": no step is lost" in notes(result)

    is_merge_due = kill.phase == "merge"
    step = 4 if is_merge_due else 3
    # The state before the merge, from a run that merges later.
    h = {"consistency__h": 8} if is_merge_due else {}
    plain = with_changes(config, fault=FaultConfig(), checkpoint__every=step, checkpoint__keep=9)
    server.run(train_small, 4, (with_changes(plain, folder=tmp_path / "four", **h),), deadline_s=DEADLINE_S)
    path, plain = tmp_path / "four" / "checkpoints" / f"step-{step:08d}", with_changes(plain, folder=tmp_path / "rest")
    size = 4 if has_new else 3
    server.run(continue_as, size, (plain, path, left, is_merge_due), backend="shm", deadline_s=DEADLINE_S)
    saved, expected = _assemble(read_checkpoint(config.folder, 8)), _assemble(read_checkpoint(tmp_path / "rest", 8))
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(saved[name], tensor, rtol=1e-11, atol=1e-12), name


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_replica_that_dies_between_two_fragments_counts_in_the_first_only(server, tmp_path, backend):
    """The merge of the last step, with the weighted means of what the replicas had before it."""
    config = recovery_config(tmp_path / "run", **FP64, **MODES["local, in fragments"])
    run_script(server, config, Script((Kill(1, 8, "second fragment"),)), backend=backend, max_restarts=0)
    before = [torch.load(tmp_path / f"member-{member}.pt") for member in range(4)]
    assert len({replica["tokens"][0] for replica in before}) == 4  # so an unweighted mean is a different one
    saved = read_checkpoint(config.folder, 8)  # each tensor in one box
    merged = {key.split("[")[0]: tensor for key, tensor in saved.items() if "params/" in key}
    fragments = set()
    for name in before[0]["masters"]:
        fragment = config.consistency.fragment_of(name)
        replicas = before if fragment == 0 else [before[0], before[2], before[3]]
        weights = [replica["tokens"][fragment] for replica in replicas]
        weighted = (weight * one["masters"][name] for weight, one in zip(weights, replicas, strict=True))
        expected = sum(weighted) / sum(weights)
        for prefix in ("", "replica-1.", "replica-2."):  # the three that are left
            found = merged.pop(f"{prefix}params/{name}")
            assert torch.allclose(found.view(expected.shape), expected, rtol=1e-12, atol=1e-14), (
                prefix,
                name,
                fragment,
            )
        fragments.add(fragment)
    assert fragments == {0, 1} and not merged


@pytest.mark.exhaustive
def test_all_replicas_go_back_to_copies_if_none_is_left_whole(server, undisturbed, tmp_path):
    """One rank of each replica has merged its shards, and the other one of one replica has not."""
    config = recovery_config(tmp_path / "run", **FP64, **MODES["diloco, zero 1 inside"])
    run_script(server, config, Script((Kill(1, 4, "merge"),), are_survivors_patient=True), backend="shm")
    check_equals_undisturbed(undisturbed, config)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.exhaustive) for mode in ("local", "gossip")] + ["diloco"]
)
def test_a_new_replica_joins_at_a_merge(server, tmp_path, mode):
    config = recovery_config(tmp_path / "run", **FP64, **MODES[mode])
    script = Script((Kill(1, 3),), wait_at=(4,), are_replacements_late=True)
    result = run_script(server, config, script, backend="shm", ranks=3)
    rows = [row for row in read_metrics(config.folder) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [value["ranks"] for value in result.values] == [3] * 3
    assert len({value["digest"] for value in result.values}) == 1  # all replicas are merged after the last step
    text = notes(result)
    assert "2 ranks go on, mesh pp=1 x dp=2 " in text
    assert "replicas that go on from their own state: 0, 2 (now 1)\n" in text
    assert re.search(r"joins\n3 ranks go on, mesh pp=1 x dp=3 .*, with the state after step 4 from the live", text)
    assert "replicas that go on from their own state: 0, 1; with the state of replica 0 and weight 0: 2\n" in text


def test_a_replica_that_missed_a_merge_begins_as_one_that_did_not():
    """Two merged replicas are in different steps, a third has not merged, and half of a fourth is left."""
    states = [ReplicaState(4, 0, 1, 20, 1, 8), ReplicaState(4, 1, 1, 22, 0, 8), ReplicaState(4, 2, 1, 21, 0, 8)]
    others = [ReplicaState(4, 3, 2, 21, 0, 8), ReplicaState(3, 0, 1, 12, 0, 8)]
    left = find_replicas_left([*others, *states])
    assert [one.replica for one in left] == [1, 2]
    assert _describe_replicas(left, 3) == (
        "replicas that go on from their own state: 1 (now 0), 2 (now 1); with the state of replica 0 and weight 0: 2"
    )


def test_a_new_replica_gets_what_replicas_have_of_their_own():
    kinds = ["params", "optimizer.exp_avg", "quantization_error", "merge", "buffers", "outer.velocity"]
    kinds.append("replica-1.params")
    shards = [TensorShard(f"{kind}/tokens", (2,), Box.whole((2,)), torch.ones(2)) for kind in kinds]
    copies = list(copy_first_replica(shards, range(2, 4)))
    names = [f"replica-{i}.{kind}/tokens" for kind in kinds[:4] for i in (2, 3)]
    assert [copy.name for copy in copies] == names
    assert all(copy.tensor is shards[0].tensor for copy in copies[:2])
