"""1F1B as a list of actions.

Write the schedule of 1F1B, which runs each backward as early as possible: the step is as fast as GPipe's, but stage p
of n has at most n - p micro-batches in flight, however many there are.

num_stages: at least 1. num_micro_batches: 0 or more, maybe fewer than stages. Returns a list with one list of actions
per stage, stage 0 first, as `gpipe` does: ("F", i) is the forward of micro-batch i, ("B", i) its backward. From its F
to its B a micro-batch is in flight on a stage.
Example: one_f_one_b(3, 4), with F0 for ("F", 0).
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3

Checked, for 1 to 7 stages and 0 to 12 micro-batches: that every stage runs each forward and each backward once, both in
the order of the micro-batches; and in a simulation that no stage waits for ever, that stage p has at most
min(n - p, micro-batches) micro-batches in flight, and that the step is as fast as GPipe's, also if a backward takes
twice or a third of the time of a forward.

You may call:
    list.append(action)   adds an action at the end; an action is a pair such as ("F", 0)
    min(a, b), range(number), enumerate(lists)   pairs of a number and a list

Check it with: python -m exercises check one_f_one_b_schedule

Stub 91499a7c.
"""

from minidist.simple.pipeline import Action


def one_f_one_b(num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the actions of each stage, in order; stage p of n has at most n - p micro-batches in flight."""
    raise NotImplementedError("return the actions of each stage: warm-up, one forward and one backward, cool-down")
