"""Tests of which_rank_hangs. `measured` is the rank status recorded when the scenario of the test's name was run,
and `sizes` on how many ranks."""

from exercises.testing import expect_prediction, test


@test(points=2)
def one_skips_the_sum(answer, measured, sizes):
    """One of three ranks skips an all-reduce."""
    expect_prediction(answer, "one_skips_the_sum", measured["one_skips_the_sum"], sizes["one_skips_the_sum"])


@test(points=2)
def both_send_first(answer, measured, sizes):
    """Two ranks send to each other before they receive."""
    expect_prediction(answer, "both_send_first", measured["both_send_first"], sizes["both_send_first"])


@test(points=2)
def barrier_on_rank_0(answer, measured, sizes):
    """Only rank 0 calls a barrier."""
    expect_prediction(answer, "barrier_on_rank_0", measured["barrier_on_rank_0"], sizes["barrier_on_rank_0"])


@test(points=2)
def neighbours_take_turns(answer, measured, sizes):
    """Four ranks in a ring; odd ranks receive first."""
    expect_prediction(
        answer, "neighbours_take_turns", measured["neighbours_take_turns"], sizes["neighbours_take_turns"]
    )


@test(points=2)
def head_of_the_chain_leaves(answer, measured, sizes):
    """Four ranks in a chain; the first rank has returned."""
    expect_prediction(
        answer, "head_of_the_chain_leaves", measured["head_of_the_chain_leaves"], sizes["head_of_the_chain_leaves"]
    )
