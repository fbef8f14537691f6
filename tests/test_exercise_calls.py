"""How a call of the learner's code is written down for the message."""

from types import SimpleNamespace

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


def test_a_world_can_be_printed_without_asking_its_store():
    world = World.single()
    world.store = Silent()
    assert "rank=0" in repr(world)
