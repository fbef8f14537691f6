"""Tests of atomic_save: every state in which a crash can leave the disk is read by the test itself."""

import json

import torch

from exercises.recorded_disk import (
    INDEX,
    RecordedDisk,
    checkpoint_files,
    crash_states,
    describe_checkpoint,
    merge_changes,
    recorded_files,
)
from exercises.testing import Wrong, expect, test
from minidist.comm import all_gather_object
from minidist.errors import RunError
from minidist.parameters import Box
from minidist.simple.checkpoint import Shard

OLD, NEW = "step-00000003", "step-00000007"
TENSORS = {
    "params/w": torch.arange(35.0).reshape(7, 5),
    "params/b": torch.arange(11.0, dtype=torch.float64) / 3,
    "optimizer.step/w": torch.tensor(7.0),
}
EARLIER = checkpoint_files(OLD, {"params/w": torch.ones(2)}, {"params/w": [(0, (0,), (2,))]}, {})


def shards_of(rank, size, saving=None):
    """Parts of unequal lengths, as views that are not contiguous; the last rank also holds what it does not save.

    saving: how many ranks save something; the others hold replicas of the first tensor only.
    """
    shards, saving = [], saving or size
    if rank == 0:
        shards.append(
            Shard("params/b", (11,), Box((4,), (4,)), torch.empty(0, dtype=torch.float64), is_saved_here=True)
        )
    if rank >= saving:
        whole = Box.whole((7, 5))
        return [Shard("params/w", (7, 5), whole, TENSORS["params/w"].clone(), is_saved_here=False)]
    size = saving
    for name, tensor in TENSORS.items():
        if not tensor.dim():
            shards.append(Shard(name, (), Box((), ()), tensor.clone(), rank == size - 1))
            continue
        axis = tensor.dim() - 1
        cuts = [tensor.shape[axis] * i // size for i in range(size + 1)]
        start, stop = [0] * tensor.dim(), list(tensor.shape)
        start[axis], stop[axis] = cuts[rank], cuts[rank + 1]
        box = Box(tuple(start), tuple(stop))
        shards.append(Shard(name, tuple(tensor.shape), box, tensor[box.slices], is_saved_here=True))
        if rank == size - 1:
            whole = Box.whole(tuple(tensor.shape))
            shards.append(Shard(name, tuple(tensor.shape), whole, -tensor, is_saved_here=False))
    return shards


class Clock:
    """Increasing numbers, in one order for all ranks of a check."""

    def __init__(self, world, name):
        self.store, self.key, self.now = world.store if world.size > 1 else None, f"clock {name}", 0

    def __call__(self):
        self.now = self.store.add(self.key, 1) if self.store else self.now + 1
        return self.now


class DiskWithBrokenRoot(RecordedDisk):
    """Cannot sync the root folder."""

    def sync(self, name):
        if not name:
            raise OSError("sync of the root folder: input/output error")
        super().sync(name)


def record(answer, world, group, name, files=EARLIER, failing=(), saving=None, kind=RecordedDisk, extra=None):
    """Save on all ranks of the group: what was returned or raised, and the changes of their disks in one order.

    extra: more of the state.
    """
    disk = kind(files, Clock(world, f"{name} {group.ranks}"), failing)
    state = {"step": 7, "rank": group.rank, **(extra or {})}
    with recorded_files(answer):
        try:
            got = str(answer.save(disk.root, 7, shards_of(group.rank, group.size, saving), state, group))
        except RunError as error:
            got = type(error)
    return got, merge_changes(all_gather_object(disk.changes, group))


def last_change(changes, count):
    return f"{changes[count - 1][0]} {changes[count - 1][1][0]}" if count else "the beginning"


@test(points=5, ranks=(1, 2, 3, 4))
def saves_every_element_once(answer, world, network):
    """The folder holds the shards of all ranks, each with its SHA-256, and the index with rank 0's state."""
    size = world.size
    cases = [(f"{size} ranks", network.group, None)]
    if size > 1:
        cases.append((f"{size} ranks, of which the last saves nothing", network.group, size - 1))
    if size == 4:
        cases.append((f"a group of the ranks {network.divided_group.ranks} of 4", network.divided_group, None))
    for case, group, saving in cases:
        got, changes = record(answer, world, group, case, saving=saving)
        expect("the folder that save returns", got, f"/recorded/{NEW}", case=case)
        [(_, files, folders), *_] = crash_states(EARLIER, changes)
        expect("the checkpoint", describe_checkpoint(files, folders, NEW, TENSORS), "whole", case=case)
        index = json.loads(files[f"{NEW}/{INDEX}"])
        expect("the step in the index", index["step"], 7, case=case)
        expect("the state in the index", index["state"], {"step": 7, "rank": 0}, case=case)
        shapes = {name: entry["shape"] for name, entry in index["tensors"].items()}
        expect("the global shapes", shapes, {name: list(tensor.shape) for name, tensor in TENSORS.items()}, case=case)
        for rank in range(saving or group.size):
            file = f"rank-{rank:05d}.safetensors"
            expect(f"whether the folder has {file}", f"{NEW}/{file}" in files, True, case=case)
        made = [arguments[0] for name, arguments in changes if name == "mkdir" and arguments[0] == f"{NEW}.partial"]
        expect(f"how often {NEW}.partial is made, by all ranks together", len(made), 1, case=case)
        for _, (name, *_) in changes:
            if name.startswith(OLD):
                raise Wrong("wrong", f"the earlier checkpoint must not be touched: {name} is changed", case=case)


@test(points=6, ranks=(1, 3))
def crash_at_every_change(answer, world, network):
    """Whenever the machine crashes, and whatever had not been synced, the checkpoint is whole or absent."""
    _, changes = record(answer, world, network.group, "crash")
    for count in range(len(changes) + 1):
        for lost, files, folders in crash_states(EARLIER, changes[:count]):
            found = describe_checkpoint(files, folders, NEW, TENSORS)
            if found not in ("whole", "absent"):
                case = f"a crash after: {last_change(changes, count)}; {lost}"
                raise Wrong("wrong", "a folder that looks like a checkpoint", "whole or absent", found, case=case)
            earlier = describe_checkpoint(files, folders, OLD, {"params/w": torch.ones(2)})
            expect("the earlier checkpoint", earlier, "whole", case=f"a crash after: {last_change(changes, count)}")
    [(_, files, folders), *_] = crash_states(EARLIER, changes)
    expect("the checkpoint without a crash", describe_checkpoint(files, folders, NEW, TENSORS), "whole")


@test(points=3, ranks=(1, 2))
def on_disk_when_it_returns(answer, world, network):
    """When save has returned, no crash can lose the checkpoint."""
    _, changes = record(answer, world, network.group, "durable")
    for lost, files, folders in crash_states(EARLIER, changes):
        case = f"a crash after save has returned; {lost}"
        expect("the checkpoint", describe_checkpoint(files, folders, NEW, TENSORS), "whole", case=case)


@test(points=4, ranks=(2, 3))
def full_disk_on_one_rank(answer, world, network):
    """If one rank cannot write or sync its file, all ranks raise RunError, and no checkpoint appears."""
    for rank in range(world.size):
        for operation in ("write", "sync"):
            failing = [(operation, ".safetensors")] if world.rank == rank else []
            got, changes = record(answer, world, network.group, f"full {operation} {rank}", failing=failing)
            case = f"the {operation} of rank {rank}'s file raises OSError"
            expect("what save does on this rank", got, RunError, case=case)
            renamed = [arguments for name, arguments in changes if name == "rename" and arguments[1] == NEW]
            expect(f"renames to {NEW}", renamed, [], case=case)


@test(points=2, ranks=(1, 3))
def no_index_no_checkpoint(answer, world, network):
    """If rank 0 cannot write or sync the index, all ranks raise RunError, and no checkpoint appears.

    If only the last sync of the root fails, all ranks raise, too; the checkpoint is whole or absent.
    """
    for operation in ("write", "sync"):
        failing = [(operation, INDEX)] if world.rank == 0 else []
        got, changes = record(answer, world, network.group, f"index {operation}", failing=failing)
        case = f"the {operation} of {INDEX} raises OSError on rank 0"
        expect("what save does on this rank", got, RunError, case=case)
        expect("renames", [arguments for name, arguments in changes if name == "rename"], [], case=case)
    expect_no_checkpoint(answer, world, network)
    got, changes = record(answer, world, network.group, "root", kind=DiskWithBrokenRoot)
    case = 'the sync of the root, "", raises OSError'
    expect("what save does on this rank", got, RunError, case=case)
    for lost, files, folders in crash_states(EARLIER, changes):
        found = describe_checkpoint(files, folders, NEW, TENSORS)
        if found not in ("whole", "absent"):
            raise Wrong("wrong", "the checkpoint", "whole or absent", found, case=f"{case}; {lost}")


def expect_no_checkpoint(answer, world, network):
    """All ranks must raise RunError, and no checkpoint may appear, if anything else fails on rank 0."""
    left = {f"{NEW}.partial/rank-00009.safetensors": b"old"}
    cases = {
        f"the mkdir of {NEW}.partial raises OSError on rank 0": ([("mkdir", ".partial")], None),
        f"the sync of {NEW}.partial raises OSError on rank 0": ([("sync", ".partial")], None),
        f"the rename of {NEW}.partial raises OSError on rank 0": ([("rename", ".partial")], None),
        f"a file in {NEW}.partial cannot be removed: OSError on rank 0": ([("remove", "")], None),
        "the state has a set, which JSON does not have: format_index raises TypeError on rank 0": ([], {"set": {1}}),
    }
    for case, (failing, extra) in cases.items():
        failing = failing if world.rank == 0 else []
        got, changes = record(answer, world, network.group, case, EARLIER | left, failing, extra=extra)
        expect("what save does on this rank", got, RunError, case=case)
        renamed = [arguments for name, arguments in changes if name == "rename" and arguments[1] == NEW]
        expect(f"renames to {NEW}", renamed, [], case=case)


@test(points=2, ranks=(1, 2))
def earlier_attempt_leaves_nothing(answer, world, network):
    """Files that an earlier attempt left in the partial folder are not in the checkpoint."""
    left = {f"{NEW}.partial/rank-00009.safetensors": b"old", f"{NEW}.partial/{INDEX}": b"old"}
    got, changes = record(answer, world, network.group, "left", files=EARLIER | left)
    expect("the folder that save returns", got, f"/recorded/{NEW}")
    [(_, files, _), *_] = crash_states(EARLIER | left, changes)
    expect("the checkpoint", describe_checkpoint(files, set(), NEW, TENSORS), "whole")
    expect("files of the earlier attempt", [name for name, data in files.items() if data == b"old"], [])
    removed = [arguments[0] for name, arguments in changes if name == "remove"]
    case = "two ranks that remove one folder disturb each other"
    expect("the folders that are removed, by all ranks together", removed, [f"{NEW}.partial"], case=case)


@test(points=2, ranks=(1, 2))
def same_step_again(answer, world, network):
    """A step that was saved before is saved again: its folder holds the new values, whenever the machine crashes.

    After each of these crashes it can be saved again.
    """
    old = {"params/w": torch.zeros(7, 5), "params/b": torch.ones(11).double(), "optimizer.step/w": torch.tensor(6.0)}
    boxes = {name: [(0, (0,) * tensor.dim(), tuple(tensor.shape))] for name, tensor in old.items()}
    before = EARLIER | checkpoint_files(NEW, old, boxes, {"step": 7})
    left = []
    got, changes = record(answer, world, network.group, "again", files=before)
    expect("the folder that save returns", got, f"/recorded/{NEW}")
    for lost, files, folders in crash_states(before, changes):
        case = f"a crash after save has returned; {lost}"
        expect("the checkpoint", describe_checkpoint(files, folders, NEW, TENSORS), "whole", case=case)
    for count in range(len(changes) + 1):
        for lost, files, folders in crash_states(before, changes[:count]):
            found = describe_checkpoint(files, folders, NEW, TENSORS)
            case = f"a crash after: {last_change(changes, count)}; {lost}"
            if found not in ("whole", "absent") and describe_checkpoint(files, folders, NEW, old) != "whole":
                raise Wrong("wrong", "a folder that looks like a checkpoint", "whole or absent", found, case=case)
            if world.size == 1 and files not in left:
                left.append(files)
                got, later = record(answer, world, network.group, f"after crash {len(left)}", files=files)
                case = f"saved after {case}"
                expect("what save does", got, f"/recorded/{NEW}", case=case)
                [(_, files, folders), *_] = crash_states(files, later)
                expect("the checkpoint", describe_checkpoint(files, folders, NEW, TENSORS), "whole", case=case)
