"""GPipe as a list of actions.

A schedule is data: the list of actions that each stage runs, in order. Write the schedule of GPipe, in which every
stage runs all forwards and then all backwards. The executor that you write in 2.8 runs any such list.

num_stages: at least 1. num_micro_batches: 0 or more. Returns a list with one list per stage, stage 0 first; equal lists
may be one object. An action is a pair: ("F", i) is the forward of micro-batch i, ("B", i) its backward. Forwards and
backwards are both in the order of the micro-batches.
Example: gpipe(2, 3) returns two lists, each F0 F1 F2 B0 B1 B2, with F0 for ("F", 0).

Checked: the lists for 1 to 4 stages and 0 to 5 micro-batches; and in a simulation that a step takes the time of
m + p - 1 forwards and as many backwards, for p stages and m micro-batches.

You may call:
    range(number)   0, 1, ..., number - 1

Check it with: python -m exercises check gpipe_schedule

Stub a63a495b.
"""

from minidist.simple.pipeline import Action


def gpipe(num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the actions of each stage, in order: all forwards, then all backwards."""
    raise NotImplementedError("return the actions of each stage: all forwards, then all backwards")
