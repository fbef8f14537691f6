"""Tests of which_rank_hangs. `measured` is the rank status recorded when the scenario of the test's name was run,
and `sizes` on how many ranks."""

from exercises.testing import predicted, test


@test(points=2)
def one_skips_the_sum(answer, measured, sizes):
    """One of three ranks leaves an all-reduce out."""
    predicted(answer, "one_skips_the_sum", measured["one_skips_the_sum"], sizes["one_skips_the_sum"])


@test(points=2)
def both_send_first(answer, measured, sizes):
    """Two ranks send to each other before they receive."""
    predicted(answer, "both_send_first", measured["both_send_first"], sizes["both_send_first"])


@test(points=2)
def barrier_on_rank_0(answer, measured, sizes):
    """A barrier that only rank 0 comes to."""
    predicted(answer, "barrier_on_rank_0", measured["barrier_on_rank_0"], sizes["barrier_on_rank_0"])


@test(points=2)
def neighbours_take_turns(answer, measured, sizes):
    """A ring of four, where odd ranks receive first."""
    predicted(answer, "neighbours_take_turns", measured["neighbours_take_turns"], sizes["neighbours_take_turns"])


@test(points=2)
def head_of_the_chain_leaves(answer, measured, sizes):
    """A chain of four whose first rank has left."""
    predicted(
        answer, "head_of_the_chain_leaves", measured["head_of_the_chain_leaves"], sizes["head_of_the_chain_leaves"]
    )
