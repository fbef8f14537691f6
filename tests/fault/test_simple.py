"""The simple version of fault tolerance, against one process and against the fast version."""

import itertools
import math
import signal
import threading
import warnings

import pytest
import torch
from torch import nn

from minidist.comm import CommError, GroupSpec, all_gather_object, all_reduce, bind, bind_all_gather_object
from minidist.comm.handles import launch
from minidist.config import PrecisionConfig
from minidist.fault.checkpoint import load_checkpoint, save_checkpoint
from minidist.fault.collective_errors import ErrorOnAnyRank
from minidist.fault.disk import Disk
from minidist.fault.shards import TensorShard
from minidist.fault.simple import agreement
from minidist.fault.simple.agreement import differing_replicas, train_step
from minidist.fault.simple.checkpoint import complete_checkpoints, load, save
from minidist.fault.simple.interval import best_interval_s, expected_time_s
from minidist.fault.simple.recovery import train as train_until_done
from minidist.fault.simple.run import Run, resume, run_shards, run_state
from minidist.mesh import Mesh
from minidist.parameters import Box
from minidist.precision.scaler import LossScaler
from minidist.tools.estimate.goodput import FailureModel
from minidist.tools.launch.elastic import ElasticRanks

SAMPLES = 23
DEADLINE_S = 60.0  # for processes of which some die


class Died(Exception):
    """The end of a rank's process, as far as the other ranks can see it."""


def group_of(world):
    return bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))])["data"]


def make_run(seed_of_values, dtype=torch.float64, before_sample=lambda sample: None, scaler=False):
    """A small network with dropout and a buffer, trained by AdamW on numbers that only the sample decides."""
    torch.manual_seed(seed_of_values)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.25), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    model.register_buffer("offset", torch.full((2,), float(seed_of_values)))

    def sample_loss(sample):
        before_sample(sample)
        values = torch.tensor([[sample, sample % 3, 1.0]], dtype=dtype) / SAMPLES
        return (model(values) - values.sum()).square().sum()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
    scaler = LossScaler(PrecisionConfig(initial_scale=8.0, growth_interval=3)) if scaler else None
    return Run(model, optimizer, sample_loss, SAMPLES, 7, lambda step: 0.02 / (1 + step), seed=5, scaler=scaler)


def tensors_of(run):
    return {shard.name: shard.tensor.detach().clone() for shard in run_shards(run, True)}


def distance(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def trained(steps, **options):
    """The run of one process, without faults, and its tensors after each step."""
    run, group = make_run(1, **options), _single_group()
    history = []
    for _ in range(steps):
        train_step(run, group)
        history.append(tensors_of(run))
    return run, history


def _single_group():
    from minidist.comm import World

    return group_of(World.single())


def _global_tensors():
    return {
        "params/matrix": torch.arange(35.0).reshape(7, 5),
        "params/vector": torch.arange(11.0, dtype=torch.float64),
        "optimizer.step/vector": torch.tensor(3.0),
    }


def _shards(rank, size, columns, filled):
    """Each tensor cut along its last dimension, or its first, into parts that are not equal; a scalar on rank 0."""
    shards = []
    for name, tensor in _global_tensors().items():
        box = Box.whole(tuple(tensor.shape))
        if tensor.dim():
            axis = tensor.dim() - 1 if columns else 0
            cuts = [round(tensor.shape[axis] * (i / size) ** 1.5) for i in range(size + 1)]
            start, stop = list(box.start), list(box.stop)
            start[axis], stop[axis] = cuts[rank], cuts[rank + 1]
            box = Box(tuple(start), tuple(stop))
        values = tensor[box.slices].clone() if filled else torch.full(box.shape, -1.0, dtype=tensor.dtype)
        shards.append(TensorShard(name, tuple(tensor.shape), box, values, bool(tensor.dim()) or rank == 0))
    return shards


def _save(world, root):
    group = group_of(world)
    state = {"step": 7, "rank": world.rank}
    folder = save(Disk(root), 7, _shards(world.rank, world.size, False, True), state, group)
    own = save_checkpoint(
        f"{root}-fast",
        7,
        _shards(world.rank, world.size, False, True),
        state,
        bind_all_gather_object(group),
        world.rank,
    )
    return folder, str(own)


def _load(world, root, fast):
    group = group_of(world)
    simple_shards = _shards(world.rank, world.size, True, False)
    fast_shards = _shards(world.rank, world.size, True, False)
    state = load(Disk(root), "step-00000007", simple_shards, group)
    index = load_checkpoint(fast, fast_shards, bind_all_gather_object(group), world.rank)
    expected = _shards(world.rank, world.size, True, True)
    for one, other, wanted in zip(simple_shards, fast_shards, expected, strict=True):
        assert torch.equal(one.tensor, wanted.tensor) and torch.equal(other.tensor, wanted.tensor), one.name
    assert state == index.state == {"step": 7, "rank": 0}


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (2, 4), (3, 2), (4, 1)])
def test_any_layout_loads_what_another_saved_like_the_fast_version(ranks, tmp_path, writers, readers):
    [(folder, fast), *_] = ranks(_save, writers, str(tmp_path / "run"))
    assert folder == "step-00000007" and Disk(tmp_path / "run").names() == [folder]
    ranks(_load, readers, str(tmp_path / "run"), fast)


def _load_damaged(world, root):
    group, shards = group_of(world), _shards(world.rank, world.size, True, False)
    with pytest.raises(ErrorOnAnyRank) as caught:
        load(Disk(root), "step-00000007", shards, group)
    assert all((shard.tensor == -1).all() for shard in shards), "a tensor was written"
    return caught.value.found_damage, str(caught.value)


@pytest.mark.parametrize("file", ["index.json", "rank-00001.safetensors"])
def test_a_damaged_checkpoint_is_refused_before_any_tensor_is_written(ranks, tmp_path, file):
    ranks(_save, 2, str(tmp_path / "run"))
    damaged = tmp_path / "run" / "step-00000007" / file
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    results = ranks(_load_damaged, 3, str(tmp_path / "run"))
    assert len(set(results)) == 1 and results[0][0] and f"{file} is damaged" in results[0][1]


class FullDisk(Disk):
    """A disk on which no file but the index can be written."""

    def write(self, name, data):
        if not name.endswith("index.json"):
            raise OSError("no space left")
        super().write(name, data)


def _save_to_full_disk(world, root):
    group = group_of(world)
    disk = FullDisk(root) if world.rank == world.size - 1 else Disk(root)
    with pytest.raises(ErrorOnAnyRank, match="no space left"):
        save(disk, 8, _shards(world.rank, world.size, False, True), {}, group)


def test_no_rank_saves_if_one_cannot(ranks, tmp_path):
    ranks(_save, 2, str(tmp_path / "run"))
    ranks(_save_to_full_disk, 3, str(tmp_path / "run"))
    assert complete_checkpoints(Disk(tmp_path / "run")) == ["step-00000007"]


class CrashingDisk(Disk):
    """A disk that raises Died instead of its n-th change."""

    def __init__(self, root, changes):
        super().__init__(root)
        self.left = changes

    def _count(self):
        self.left -= 1
        if self.left < 0:
            raise Died

    def write(self, name, data):
        if self.left == 0:  # half of the file
            super().write(name, data[: len(data) // 2])
        self._count()
        super().write(name, data)

    def rename(self, old, new):
        self._count()
        super().rename(old, new)

    def remove(self, name):
        self._count()
        super().remove(name)

    def sync(self, name):
        self._count()
        super().sync(name)


def test_a_crash_leaves_the_earlier_checkpoint_or_the_new_one(tmp_path):
    group, survived = _single_group(), []
    for changes in itertools.count():
        run, root = make_run(1), tmp_path / str(changes)
        train_step(run, group)
        save(Disk(root), 1, run_shards(run, True), run_state(run), group)
        states = {1: tensors_of(run)}
        train_step(run, group)
        states[2] = tensors_of(run)
        try:
            save(CrashingDisk(root, changes), 2, run_shards(run, True), run_state(run), group)
            completed = True
        except ErrorOnAnyRank as failure:
            assert isinstance(failure.__cause__, Died)
            completed = False
        fresh = make_run(2)
        assert resume(fresh, Disk(root), group)
        assert distance(tensors_of(fresh), states[fresh.step]) == 0
        survived.append(fresh.step)
        save(Disk(root), 3, run_shards(fresh, True), run_state(fresh), group)
        if completed:
            break
    assert survived[0] == 1 and survived[-1] == 2 and survived == sorted(survived) and len(survived) > 7


@pytest.mark.parametrize("scaler", [False, True])
def test_a_resumed_run_is_the_same_run(tmp_path, scaler):
    whole, history = trained(9, scaler=scaler)
    group, run = _single_group(), make_run(1, scaler=scaler)
    for until in (2, 5, 9):
        while run.step < until:
            train_step(run, group)
        assert distance(tensors_of(run), history[until - 1]) == 0
        save(Disk(tmp_path), run.step, run_shards(run, True), run_state(run), group)
        run = make_run(until + 1, scaler=scaler)
        run.seed = 77
        assert resume(run, Disk(tmp_path), group)
    assert distance(tensors_of(run), tensors_of(whole)) == 0
    assert run_state(run) == run_state(whole)


def test_a_resume_falls_back_to_the_checkpoint_before_a_damaged_one(tmp_path):
    group, run, disk = _single_group(), make_run(1), Disk(tmp_path)
    for _ in range(3):
        train_step(run, group)
        save(disk, run.step, run_shards(run, True), run_state(run), group)
    (tmp_path / "step-00000003" / "index.json").write_text("nothing")
    (tmp_path / "step-00000002" / "rank-00000.safetensors").unlink()
    fresh = make_run(2)
    with pytest.warns(UserWarning, match="is not used"):
        assert resume(fresh, disk, group)
    assert fresh.step == 1
    assert not resume(make_run(2), Disk(tmp_path / "nothing"), group)


def _train(world, steps):
    run, group = make_run(1), group_of(world)
    for _ in range(steps):
        assert train_step(run, group)
    return tensors_of(run)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_number_of_ranks_trains_the_run_of_one_process(ranks, size):
    whole, _ = trained(6)
    for tensors in ranks(_train, size, 6):
        assert distance(tensors, tensors_of(whole)) < 1e-12


def _spoiled(world, kind):
    """One rank's gradients are unusable or NaN in step 2."""

    def fail(sample):
        if run.step == 2 and world.rank == world.size - 1 and kind == "unusable":
            raise OSError("this sample cannot be read")

    run, group = make_run(1, before_sample=fail, scaler=True), group_of(world)
    loss = run.sample_loss
    run.sample_loss = lambda sample: loss(sample) * (math.nan if is_spoiled() else 1.0)

    def is_spoiled():
        return kind == "NaN" and run.step == 2 and world.rank == 0

    updates = []
    for step in range(5):
        before = tensors_of(run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            updates.append(train_step(run, group))
        assert updates[-1] == (distance(tensors_of(run), before) > 0 if step else True)
    return updates, run.scaler.scale, differing_replicas(tensors_of(run), group)


@pytest.mark.parametrize(("kind", "scale"), [("unusable", 16.0), ("NaN", 4.0)])
def test_all_ranks_update_or_none(ranks, kind, scale):
    assert ranks(_spoiled, 3, kind) == [([True, True, False, True, True], scale, {})] * 3


def _train_with_a_death(world, root, size, dying, when):
    """Process `dying` is killed in step 4; a new one joins after the next save. Returns what each process returns."""

    def train(number, rendezvous):
        def die(sample):
            if number == dying and run.step == (4 if when == "before the update" else 5):
                signal.raise_signal(signal.SIGKILL)

        run = make_run(9 if number == size else 1, before_sample=die)
        run.seed = 1234 if number == size else run.seed
        last = train_until_done(run, Disk(root), rendezvous, 11, 3, join=number == size)
        return tensors_of(run), run_state(run), last.size, differing_replicas(tensors_of(run), last)

    def add_one(members):
        if ranks.dead and len(ranks.pids) < size:
            ranks.start_process()

    with ElasticRanks(train, size, on_group=add_one) as ranks:
        return dict(ranks.serve(DEADLINE_S)), ranks.groups


@pytest.mark.parametrize("when", ["before the update", "after the update"])
@pytest.mark.parametrize(("size", "dying"), [(2, 0), (3, 1), (4, 3)])
def test_the_survivors_go_on_and_a_new_rank_joins(ranks, tmp_path, size, dying, when):
    whole, _ = trained(11)
    [(values, groups)] = ranks(_train_with_a_death, 1, str(tmp_path), size, dying, when)
    everyone = list(range(size))
    survivors = [number for number in everyone if number != dying]
    # The first group, the group after the save of step 3, the survivors, and with the new one from step 6 on.
    assert groups == [everyone, everyone, survivors, [*survivors, size], [*survivors, size]]
    assert sorted(values) == [*survivors, size]
    for tensors, state, last, differing in values.values():
        assert distance(tensors, tensors_of(whole)) < 1e-12
        assert (state, last, differing) == (run_state(whole), size, {})


def _one_rank_is_ahead(world, root):
    """In step 4 process 2 dies after its update, and process 1 loses the connection before its own."""

    def train(number, rendezvous):
        def die(sample):
            if number == 2 and run.step == 5:
                signal.raise_signal(signal.SIGKILL)

        def break_after_sum(tensor, group):
            all_reduce(tensor, group)
            if number == 1 and run.step == 4 and not broken:
                broken.append(True)
                raise CommError("all_reduce failed: Connection closed by peer")

        run, broken = make_run(1, before_sample=die), []
        agreement.all_reduce = break_after_sum  # in this process, which ends with the test
        train_until_done(run, Disk(root), rendezvous, 7, 7)
        return tensors_of(run), run_state(run)

    with ElasticRanks(train, 3) as ranks:
        return dict(ranks.serve(DEADLINE_S)), ranks.groups


def test_the_survivors_take_the_state_of_the_rank_that_is_ahead(ranks, tmp_path):
    whole, _ = trained(7)
    [(values, groups)] = ranks(_one_rank_is_ahead, 1, str(tmp_path))
    assert groups == [[0, 1, 2], [0, 1], [0, 1]] and sorted(values) == [0, 1]
    for tensors, state in values.values():
        assert distance(tensors, tensors_of(whole)) < 1e-12 and state == run_state(whole)


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


def _digest(world):
    group, found = group_of(world), []
    for rank in range(world.size):
        tensors = {"weight": torch.ones(5, 3), "bias": torch.zeros(7, dtype=torch.bfloat16), "step": torch.tensor(1)}
        if world.rank == rank:
            tensors["bias"][3] = -0.0
        found.append(differing_replicas(tensors, group))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_flipped_sign_of_zero_is_found(ranks, size):
    expected = {1: [{}], 2: [{"bias": [0, 1]}] * 2}.get(size, [{"bias": [rank]} for rank in range(size)])
    assert ranks(_digest, size) == [expected] * size


def _digest_of_nothing(world):
    return differing_replicas({}, group_of(world))


@pytest.mark.parametrize("size", [1, 2])
def test_replicas_without_tensors_do_not_differ(ranks, size):
    assert ranks(_digest_of_nothing, size) == [{}] * size


@pytest.mark.parametrize("model", [(10800.0, 30.0, 60.0), (500.0, 100.0, 0.0), (1e6, 0.5, 300.0), (60.0, 90.0, 5.0)])
def test_the_best_interval_is_that_of_the_fast_version(model):
    exact = FailureModel(*model)
    assert math.isclose(best_interval_s(*model), exact.exact_interval_s(), rel_tol=1e-5)
    assert math.isclose(expected_time_s(100.0, *model), exact.expected_time_s(100.0), rel_tol=1e-12)


def test_a_communication_error_leaves_the_run_as_it_was():
    run, group = make_run(1), _single_group()
    train_step(run, group)
    before, state = tensors_of(run), run_state(run)

    def broken(tensor, group):
        raise CommError("the peer is gone")

    all_reduce, agreement.all_reduce = agreement.all_reduce, broken
    try:
        with pytest.raises(CommError):
            train_step(run, group)
    finally:
        agreement.all_reduce = all_reduce
    assert distance(tensors_of(run), before) == 0 and run_state(run) == state
    assert all_gather_object(1, group) == [1]
