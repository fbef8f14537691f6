"""Kill a process at every file operation of a save, and read the checkpoints that it left.

Run as a program, with a folder and "fast" or "simple", the trainer that saves; it prints one JSON object. A clean
process forks one child per file operation: the child ends itself with SIGKILL just before its k-th operation, or
half-way through writing a file. Between two operations nothing changes on disk, so these are all the states that a kill
can leave.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from minidist.checkpoint import save
from minidist.checkpoint.folders import complete_checkpoints, latest_checkpoint, prune_checkpoints
from minidist.checkpoint.save import save_checkpoint
from minidist.comm import World, bind
from minidist.mesh import Mesh
from minidist.parameters import Box
from minidist.simple import checkpoint as simple
from tests.helpers.checkpoint_cases import full_shard, load_full_tensors


def save_value(root, step, value):
    return save_checkpoint(root, step, [full_shard("w", torch.full((8,), float(value)))], {"value": value})


def save_value_simply(root, step, value):
    group = bind(World.single(), Mesh())["control"]
    shard = simple.Shard("w", (8,), Box.whole((8,)), torch.full((8,), float(value)), is_saved_here=True)
    return simple.save(root, step, [shard], {"value": value}, group)


def read_value(path):
    """The value saved in a checkpoint; raises if the checkpoint is incomplete."""
    tensor = {"w": torch.zeros(8)}
    state = load_full_tensors(path, tensor).state
    assert tensor["w"].tolist() == [state["value"]] * 8
    return state["value"]


def kill_before_operation(moment):
    """Make this process die before its file operation number `moment`, counted from 0 from now on."""
    count = 0

    def reached():
        nonlocal count
        count += 1
        return count > moment

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def before(module, name):
        real = getattr(module, name)

        def operation(*args, **options):
            if reached():
                die()
            return real(*args, **options)

        setattr(module, name, operation)

    def half_way(module, name, file_at):
        real = getattr(module, name)

        def operation(*args, **options):
            result = real(*args, **options)
            if reached():
                os.truncate(args[file_at], os.path.getsize(args[file_at]) // 2)
                die()
            return result

        setattr(module, name, operation)

    for name in ("mkdir", "rmdir", "unlink", "rename", "fsync", "chmod"):
        before(os, name)
    half_way(save, "write_tensor_file", 0)
    for name in ("write_text", "write_bytes"):
        half_way(Path, name, 0)


def kill_everywhere(root, prepare, act):
    """Kill `act` at every file operation; return the values of the checkpoints left after each kill.

    After each kill `act` is run again without one, and must leave complete checkpoints only.
    """
    results = []
    for moment in range(1000):
        folder = root / str(moment)
        folder.mkdir()
        prepare(folder)
        child = os.fork()
        if child == 0:
            kill_before_operation(moment)
            act(folder)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        values = [read_value(path) for path in complete_checkpoints(folder).values()]
        results.append({"latest": read_value(latest_checkpoint(folder)), "all": values})
        if status == 0:
            return results
        assert os.WTERMSIG(status) == signal.SIGKILL
        act(folder)
        names = sorted(os.listdir(folder))
        assert names == sorted(path.name for path in complete_checkpoints(folder).values()), names
        assert not any(name.endswith(".replaced") for name in names)
    raise AssertionError("the save never ended")


def save_new_step(folder):
    prune_checkpoints(folder, keep=2, just_saved=save_value(folder, 2, 20))


def replace_step(folder):
    prune_checkpoints(folder, keep=2, just_saved=save_value(folder, 1, 20))


def save_and_keep_one(folder):
    prune_checkpoints(folder, keep=1, just_saved=save_value(folder, 3, 20))


def one_checkpoint(folder):
    save_value(folder, 1, 10)


def two_checkpoints(folder):
    save_value(folder, 1, 5)
    save_value(folder, 2, 10)


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = {
        "fast": {
            "new step": (one_checkpoint, save_new_step),
            "same step": (one_checkpoint, replace_step),
            "keep one": (two_checkpoints, save_and_keep_one),
        },
        "simple": {
            "new step": (one_checkpoint, lambda folder: save_value_simply(folder, 2, 20)),
            "same step": (one_checkpoint, lambda folder: save_value_simply(folder, 1, 20)),
        },
    }[sys.argv[2]]
    results = {}
    for name, (prepare, act) in cases.items():
        place = Path(sys.argv[1], name)
        place.mkdir()
        results[name] = kill_everywhere(place, prepare, act)
    print(json.dumps(results))
