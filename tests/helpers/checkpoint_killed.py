"""Kill a process at every step of a save, and look at what it left. Run as a program; prints one JSON object.

A clean process forks one child per step, as the disk sees them: the child ends itself with SIGKILL just before its k-th
operation, or half-way through writing a file. Between two operations nothing changes on disk, so these are all the
states a kill can leave.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from minidist.fault import checkpoint
from minidist.fault.checkpoint import save_checkpoint
from minidist.fault.folders import complete_checkpoints, latest_checkpoint, prune_checkpoints
from tests.helpers.checkpoint_cases import load_all, whole


def write(root, step, value):
    return save_checkpoint(root, step, [whole("w", torch.full((8,), float(value)))], {"value": value})


def value_of(path):
    """The value saved in a checkpoint; raises unless it is whole."""
    tensor = {"w": torch.zeros(8)}
    state = load_all(path, tensor).state
    assert tensor["w"].tolist() == [state["value"]] * 8
    return state["value"]


def kill_at(moment):
    """From now on the process dies before its operation number `moment` on the disk, counted from 0."""
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
    half_way(checkpoint, "save_file", 1)
    half_way(Path, "write_text", 0)


def outcomes(root, prepare, act):
    """For every moment: the value of the latest checkpoint after a kill there, and whether the next save is well."""
    found = []
    for moment in range(1000):
        place = root / str(moment)
        place.mkdir()
        prepare(place)
        child = os.fork()
        if child == 0:
            kill_at(moment)
            act(place)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        values = [value_of(path) for path in complete_checkpoints(place).values()]
        found.append({"latest": value_of(latest_checkpoint(place)), "all": values})
        if status == 0:
            return found
        assert os.WTERMSIG(status) == signal.SIGKILL
        act(place)
        names = sorted(os.listdir(place))
        assert names == sorted(path.name for path in complete_checkpoints(place).values()), names
        assert not any(name.endswith(".replaced") for name in names)
    raise AssertionError("the save never ended")


def new_step(place):
    prune_checkpoints(place, keep=2, written=write(place, 2, 20))


def same_step(place):
    prune_checkpoints(place, keep=2, written=write(place, 1, 20))


def keep_one(place):
    prune_checkpoints(place, keep=1, written=write(place, 3, 20))


def one(place):
    write(place, 1, 10)


def two(place):
    write(place, 1, 5)
    write(place, 2, 10)


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = {"new step": (one, new_step), "same step": (one, same_step), "keep one": (two, keep_one)}
    results = {}
    for name, (prepare, act) in cases.items():
        place = Path(sys.argv[1], name)
        place.mkdir()
        results[name] = outcomes(place, prepare, act)
    print(json.dumps(results))
