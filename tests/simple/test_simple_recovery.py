"""Recovery of the simple trainer: one wrong bit is named and repaired, a new rank gets its state, and the run goes on.

Every comparison is bit by bit, with a trainer that nothing has disturbed.
"""

import math
import re
import signal
import threading
from functools import partial

import pytest
import torch

from minidist.comm import CommError, World, all_reduce, bind
from minidist.comm.handles import launch
from minidist.config import MeshConfig
from minidist.errors import RunError
from minidist.mesh import Mesh
from minidist.simple import mixed_precision
from minidist.simple.recovery import best_interval_s, differing_replicas, expected_time_s, recover, replicated_tensors
from minidist.tools.estimate.goodput import FailureModel
from minidist.tools.launch.elastic import ElasticRanks
from tests.helpers.small_run import small_config, write_text

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
MATRIX = "model.layers.0.mlp.down_proj.weight"
MODEL = {"model__num_layers": 2, "model__num_kv_heads": 2}
TIED = {"model__tie_embeddings": True}
FP16 = {"precision__policy": "fp16", "precision__growth_interval": 1}
MOMENTUM = {"optim__kind": "sgd", "optim__momentum": 0.9}


@pytest.fixture
def config_of(tmp_path):
    """`config_of(mesh, **changes)`: a small model of two layers, with dropout, trained by AdamW."""

    def make(mesh, **changes):
        changes = {"optim__kind": "adamw", "optim__lr": 0.01, **MODEL, **changes}
        return small_config(tmp_path / "run", write_text(tmp_path), mesh=MeshConfig(**mesh), **changes)

    return make


def make_trainer(world, config, steps=0):
    from minidist.simple.trainer import Trainer

    trainer = Trainer(world, config)
    for _ in range(steps):
        trainer.step()
    return trainer


def state_of(trainer):
    """Copies of all tensors, bit by bit, of the loss scaler's state and of the progress."""
    tensors = {name: tensor.detach().clone() for name, (tensor, _) in replicated_tensors(trainer).items()}
    bits = {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in tensors.items()}
    scaler = trainer.engine.scaler
    return bits, None if scaler is None else scaler.state_dict(), trainer.progress


def find(trainer):
    return differing_replicas(replicated_tensors(trainer), trainer.engine.control)


def flip_bit(tensor):
    """Change the lowest bit of the last element."""
    tensor.detach().view(-1)[-1:].view(torch.uint8)[0] ^= 1


def assert_same_steps(trainer, undisturbed, steps):
    for _ in range(steps):
        assert trainer.step() == undisturbed.step()
        assert state_of(trainer) == state_of(undisturbed)


# -- one wrong bit ----------------------------------------------------------------------------------------------------

# layout: mesh, changes of the configuration, {tensor: rank where one of its bits is wrong}
WRONG_BITS = {
    "dp3": ({"dp": 3}, {}, {f"params/{MATRIX}": 1, f"optimizer.exp_avg/{NORM}": 0, f"optimizer.step/{NORM}": 2}),
    "dp3 fp16": ({"dp": 3}, FP16, {f"params/{MATRIX}": 2, f"masters/{MATRIX}": 1}),
    "dp2 tp2": ({"dp": 2, "tp": 2}, {}, {f"params/{NORM}": 2}),
    "dp2 cp2": ({"dp": 2, "cp": 2}, {}, {f"optimizer.exp_avg_sq/{EMBEDDING}": 1}),
    "pp2 dp2 tied": ({"pp": 2, "dp": 2}, TIED, {f"params/{EMBEDDING}": 3}),
}


def repair_each_bit(world, config, wrong_bits):
    trainer, undisturbed = make_trainer(world, config, steps=2), make_trainer(world, config, steps=2)
    assert find(trainer) == {}
    for name, rank in wrong_bits.items():
        if world.rank == rank:
            flip_bit(replicated_tensors(trainer)[name][0])
        assert find(trainer) == {name: [rank]}
        assert recover(trainer, None if world.rank == rank else trainer) == [rank]
        assert find(trainer) == {} and state_of(trainer) == state_of(undisturbed)
    assert_same_steps(trainer, undisturbed, 2)


@pytest.mark.parametrize("layout", WRONG_BITS)
def test_one_wrong_bit_is_named_and_repaired(ranks, config_of, layout):
    mesh, changes, wrong_bits = WRONG_BITS[layout]
    ranks(repair_each_bit, math.prod(mesh.values()), config_of(mesh, **changes), wrong_bits)


def find_one_bit(world, config, name, wrong, replicas):
    trainer = make_trainer(world, config)
    if world.rank == wrong:
        flip_bit(replicated_tensors(trainer)[name][0])
    assert find(trainer) == {name: replicas}
    before = state_of(trainer)
    with pytest.raises(RunError, match=f"no healthy replica, such as that of {EMBEDDING} on ranks"):
        recover(trainer, None if world.rank in replicas else trainer)
    assert state_of(trainer) == before


@pytest.mark.parametrize(
    ("mesh", "changes", "name", "wrong", "replicas"),
    [
        ({"dp": 2, "tp": 2}, {}, MATRIX, 3, [1, 3]),
        ({"pp": 2}, TIED, EMBEDDING, 0, [0, 1]),
    ],
)
def test_of_two_replicas_nobody_knows_which_is_right(ranks, config_of, mesh, changes, name, wrong, replicas):
    config = config_of(mesh, **changes)
    ranks(find_one_bit, math.prod(mesh.values()), config, f"params/{name}", wrong, replicas)


def find_a_shard(world, configs):
    for config in configs:
        trainer = make_trainer(world, config, steps=2)
        assert find(trainer) == {}
        if world.rank == 3:
            flip_bit(trainer.engine.reducer.masters[EMBEDDING])
        assert find(trainer)[f"masters/{EMBEDDING}"] == [1, 3]


def test_both_stages_shard_a_tied_embedding_in_the_same_way(ranks, config_of):
    mesh = {"pp": 2, "dp": 2}
    ranks(find_a_shard, 4, [config_of(mesh, **TIED, zero__stage=stage) for stage in (1, 2, 3)])


def compare_small_tensors(world):
    group, rank = bind(world, Mesh(dp=world.size))["control"], world.rank
    everyone, others = tuple(range(4)), (0, 2) if rank % 2 == 0 else (1, 3)
    tensors = {
        "zero": (torch.tensor([0.0, -0.0 if rank == 2 else 0.0]), everyone),
        "order": (torch.tensor([2, 1] if rank == 0 else [1, 2]), everyone),
        "two and two": (torch.tensor(rank // 2), everyone),
        "own": (torch.tensor(rank), (rank,)),
        "pairs": (torch.ones(2, 3).T if rank < 2 else torch.ones(3, 2), others),
        "one pair": (torch.tensor(rank == 3), others),
        "transposed": (torch.arange(6).view(2, 3).T.contiguous() if rank else torch.arange(6).view(2, 3).T, everyone),
    }
    if rank != 1:
        tensors["missing"] = torch.zeros(0), everyone
    return differing_replicas(tensors, group)


def test_each_set_of_replicas_is_compared_by_its_bits(ranks):
    expected = {"zero": [2], "order": [0], "two and two": [0, 1, 2, 3], "one pair": [1, 3], "missing": [1]}
    assert ranks(compare_small_tensors, 4) == [expected] * 4


def compare_nothing(world):
    tensors, everyone = {"bias": torch.zeros(7, dtype=torch.bfloat16)}, tuple(range(world.size))
    group, found = bind(world, Mesh(dp=world.size))["control"], []
    for changed in range(world.size):
        bias = tensors["bias"].clone()
        if world.rank == changed:
            bias[3] = -0.0
        found.append(differing_replicas({"bias": (bias, everyone)}, group))
    return differing_replicas({}, group), found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_single_rank_and_no_tensors_have_no_difference_and_two_replicas_no_majority(ranks, size):
    expected = {1: [{}], 2: [{"bias": [0, 1]}] * 2, 3: [{"bias": [rank]} for rank in range(3)]}[size]
    assert ranks(compare_nothing, size) == [({}, expected)] * size


# -- a new rank -------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "dp2 momentum": ({"dp": 2}, MOMENTUM),
    "dp3 fp16": ({"dp": 3}, FP16),
    "dp2 tp2 bf16": ({"dp": 2, "tp": 2}, {"precision__policy": "bf16"}),
    "dp2 cp2": ({"dp": 2, "cp": 2}, {}),
    "pp2 dp2 tied": ({"pp": 2, "dp": 2}, TIED),
}


def replace_rank(world, config, lost):
    """All ranks build a new trainer, as after the death of a rank; rank `lost` has no other."""
    old, new = make_trainer(world, config, steps=2), make_trainer(world, config)
    if world.rank == lost:
        for master in new.engine.reducer.masters.values():
            master.detach().fill_(math.nan)
    assert recover(new, None if world.rank == lost else old) == [lost]
    assert state_of(new) == state_of(old)
    assert_same_steps(new, old, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_new_rank_continues_the_run(ranks, config_of, layout):
    mesh, changes = LAYOUTS[layout]
    size = math.prod(mesh.values())
    ranks(replace_rank, size, config_of(mesh, **changes), size - 1)


def catch_up(world, config):
    """The update of the second step has reached rank 0 only. Before the first one there are no optimizer states."""
    ahead, behind, new = (make_trainer(world, config) for _ in range(3))
    assert recover(ahead, behind if world.rank else None) == [0]
    ahead.step()
    assert recover(behind, ahead) == []
    assert state_of(behind) == state_of(ahead)
    ahead.step()
    assert recover(new, behind if world.rank else ahead) == [1]
    assert_same_steps(new, ahead, 1)


def test_a_rank_that_is_one_step_behind_receives_the_newest_state(ranks, config_of):
    ranks(catch_up, 2, config_of({"dp": 2}, **FP16))


# -- no replica -------------------------------------------------------------------------------------------------------


def refuse(world, configs):
    messages = []
    for config in configs:
        old, new = make_trainer(world, config, steps=1), make_trainer(world, config)
        before = state_of(new)
        with pytest.raises(RunError) as caught:
            recover(new, None if world.rank == 1 else old)
        assert state_of(new) == before and new.progress.step == 0
        messages.append(str(caught.value))
    return messages


def test_a_shard_without_replica_is_refused_and_nothing_changes(ranks, config_of):
    configs = [config_of({"dp": 2}, zero__stage=stage) for stage in (1, 2, 3)] + [config_of({"tp": 2})]
    [messages, others] = ranks(refuse, 2, configs)
    assert messages == others
    for message in messages:
        assert re.fullmatch(
            r"\d+ shards have no healthy replica, such as that of model\.embed_tokens\.weight on rank 1; "
            r"healthy: rank 0\. Go on from the last checkpoint\.",
            message,
        )


# -- processes that really die ----------------------------------------------------------------------------------------

DEADLINE_S = 60.0
FP64 = {"precision__policy": "fp64", "train__micro_batches": 1, "optim__schedule": "constant"}


def train_with_a_death(world, config, size, dying, death, break_at=None):
    """Train seven steps in processes; return what each process returns, and the members of all groups.

    `dying` is killed in step `death`, and then a process is started that joins after step 6. break_at: process 1 does
    not get the decision of this step, as if the connection broke: all others are a step ahead of it.
    """

    def train(number, rendezvous):
        def break_after_sum(tensor, group):
            all_reduce(tensor, group)
            if number == 1 and trainer.progress.step == break_at and not broken:
                broken.append(True)
                raise CommError("all_reduce failed: Connection closed by peer")

        broken, group = [], rendezvous(None)
        mixed_precision.all_reduce = break_after_sum  # in this process, which ends with the test
        trainer = make_trainer(group.world, config)
        if number >= size:
            recover(trainer, None)
        while trainer.progress.step < 7:
            if number == dying and trainer.progress.step == death:
                signal.raise_signal(signal.SIGKILL)
            try:
                trainer.step()
                must_meet = trainer.progress.step == 6
            except CommError:
                must_meet = True
            if must_meet:
                group = rendezvous(group)
                old, trainer = trainer, make_trainer(group.world, config)
                recover(trainer, old)
        tensors = {name: tensor.detach().clone() for name, (tensor, _) in replicated_tensors(trainer).items()}
        return tensors, trainer.progress, group.size

    def add_one(members):
        if processes.dead and len(processes.pids) < size and break_at is None:
            processes.start_process()

    with ElasticRanks(train, size, on_group=add_one) as processes:
        return dict(processes.serve(DEADLINE_S)), processes.groups


def assert_undisturbed(values, config, size):
    undisturbed = make_trainer(World.single(), config, steps=7)
    expected = {name: tensor.detach() for name, (tensor, _) in replicated_tensors(undisturbed).items()}
    for tensors, progress, last_size in values.values():
        assert (progress, last_size, tensors.keys()) == (undisturbed.progress, size, expected.keys())
        for name, tensor in tensors.items():
            assert torch.allclose(tensor, expected[name], rtol=1e-9, atol=1e-11), name


@pytest.mark.parametrize(("size", "dying"), [(2, 0), (4, 3)])
def test_the_survivors_repeat_the_step_and_a_new_process_joins(ranks, config_of, size, dying):
    config = config_of({}, **FP64)
    [(values, groups)] = ranks(train_with_a_death, 1, config, size, dying, 3)
    everyone = list(range(size))
    survivors = [number for number in everyone if number != dying]
    assert groups == [everyone, survivors, [*survivors, size]] and sorted(values) == [*survivors, size]
    assert_undisturbed(values, config, size)


def test_the_survivors_take_the_state_of_the_one_that_is_ahead(ranks, config_of):
    config = config_of({}, **FP64)
    [(values, groups)] = ranks(train_with_a_death, 1, config, 3, 2, 4, 3)
    assert groups == [[0, 1, 2], [0, 1], [0, 1]] and sorted(values) == [0, 1]
    assert_undisturbed(values, config, 2)


def test_a_lost_connection_leaves_the_training_state_as_it_was(config_of, monkeypatch):
    trainer = make_trainer(World.single(), config_of({}, **FP16), steps=2)
    before = state_of(trainer)

    def lose_connection(tensor, group):
        raise CommError("the peer is gone")

    monkeypatch.setattr(mixed_precision, "all_reduce", lose_connection)
    with pytest.raises(CommError):
        trainer.step()
    assert state_of(trainer) == before


# -- how often to save ------------------------------------------------------------------------------------------------


def test_the_best_interval_has_the_least_cost_per_second():
    # The example of chapter 07: 800 s of work, 30 of the save, 37.5 lost to failures.
    assert expected_time_s(800.0, 10800.0, 30.0, 60.0) == pytest.approx(867.5, abs=0.05)
    for mtbf, save, restart in ((10800.0, 30.0, 60.0), (60.0, 150.0, 5.0), (3e7, 5.0, 600.0)):
        cost = partial(expected_time_s, mtbf_s=mtbf, save_s=save, restart_s=restart)
        best = best_interval_s(mtbf, save, restart)
        assert all(cost(best) / best < cost(best * factor) / (best * factor) for factor in (0.5, 0.99, 1.01, 2.0))
    assert best_interval_s(3e7, 5.0) == pytest.approx(math.sqrt(2 * 5.0 * 3e7), rel=1e-3)  # Young 1974


@pytest.mark.parametrize("model", [(10800.0, 30.0, 60.0), (500.0, 100.0, 0.0), (1e6, 0.5, 300.0), (60.0, 90.0, 5.0)])
def test_the_best_interval_is_that_of_the_estimate(model):
    estimate = FailureModel(*model)
    assert best_interval_s(*model) == pytest.approx(estimate.exact_interval_s(), rel=1e-5)
    assert expected_time_s(100.0, *model) == pytest.approx(estimate.expected_time_s(100.0), rel=1e-12)


class LostOperation:
    """An operation of gloo that does not end although the connection has broken."""

    def is_completed(self):
        return False

    def wait(self):
        threading.Event().wait()


def _wait_for_a_lost_operation(world):
    """Process 1 dies while process 0 waits for an operation that gloo has forgotten."""

    def train(number, rendezvous):
        group = rendezvous(None)
        if number == 1:
            signal.raise_signal(signal.SIGKILL)
        try:
            launch(group, "all_reduce", torch.zeros(2), LostOperation, [])
        except CommError as error:
            return str(error), rendezvous(group).size

    with ElasticRanks(train, 2) as ranks:
        return dict(ranks.serve(DEADLINE_S)), ranks.groups


def test_a_death_ends_an_operation_of_which_gloo_lost_the_error(ranks):
    [(values, groups)] = ranks(_wait_for_a_lost_operation, 1)
    assert values.keys() == {0}
    error, size = values[0]
    assert "failed: another rank has died or left, and gloo has not ended the operation" in error
    assert groups == [[0, 1], [0]] and size == 1
