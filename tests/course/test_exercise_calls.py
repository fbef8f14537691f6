"""How messages show a call of the learner's code."""

from types import SimpleNamespace

import numpy as np
import torch

from exercises.testing import Answer
from minidist.comm import World


class Silent:
    """Whoever asks for its text waits long, as for that of a store, which asks the name service."""

    def __repr__(self):
        raise AssertionError("nobody wants to know")


def noted(*args, **kwargs):
    """What is noted of `double(...)` with these arguments."""
    notes = []

    def double(x, group=None):
        return x

    Answer(SimpleNamespace(double=double), notes.append).double(*args, **kwargs)
    return notes


def test_values_are_shown_and_objects_named_by_their_class():
    assert noted([1, 2.5, "a"]) == ["double(x=[1, 2.5, 'a'])"]
    assert noted({"a": torch.ones(2)}) == ["double(x={'a': [1.0, 1.0]})"]
    assert noted(torch.ones(2), group=Silent()) == ["double(x=[1.0, 1.0], group=<Silent>)"]
    assert noted(x for x in "ab") == ["double(x=<generator>)"]


def test_large_arrays_are_outlined_and_a_call_is_one_line():
    assert noted(torch.ones(24, 10).double()) == ["double(x=<(24, 10) float64>)"]
    assert noted({"a": torch.ones(3, 3)}) == ["double(x={'a': <(3, 3) float32>})"]
    assert noted((np.arange(9), 1)) == ["double(x=[<(9,) int64>, 1])"]
    assert noted(np.arange(8)) == ["double(x=[0, 1, 2, 3, 4, 5, 6, 7])"]
    assert noted(torch.ones(2, 0)) == ["double(x=[[], []])"]
    (told,) = noted(list(range(90)), group=list(range(90)))
    assert len(told) == 108 and told.startswith("double(x=[0, 1, 2,") and told.endswith(" ...")


def test_a_world_can_be_printed_without_asking_its_store():
    world = World.single()
    world.store = Silent()
    assert "rank=0" in repr(world)
