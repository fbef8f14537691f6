"""Tests of which_rank_hangs. `measured` is what the boards showed when the scenario of the test's name was run,
and `sizes` on how many ranks."""

from collections.abc import Collection

from exercises.testing import Wrong, test


def predicted(answer, name, measured, size):
    """The learner's answer must be the ranks that were seen to wait for ever."""
    answers = answer.ANSWERS
    if type(answers) is not dict:  # one of another class could look up what is expected
        raise Wrong("type", "ANSWERS must be a table of answers, as in the stub", "a dict", type(answers).__name__)
    given, case = answers.get(name), f'ANSWERS["{name}"]'
    if given is None:
        raise Wrong("unwritten", f"not answered yet: {case}")
    if not isinstance(given, Collection) or not all(type(rank) is int for rank in given):
        raise Wrong("type", "an answer is a set of ranks, set() for none", "like {0, 2}", repr(given)[:80], case=case)
    given = sorted(set(given))
    if others := set(given) - set(range(size)):
        what = f"there is no rank {min(others)}: this scenario runs on the ranks 0 to {size - 1}"
        raise Wrong("wrong", what, got=", ".join(map(str, given)), case=case)
    if given == measured:
        return
    if set(given) - set(measured):
        what = "a rank that you name returns: it was seen to come to its end"
    else:
        what = "you name only ranks that wait for ever, but not all of them"
    raise Wrong("wrong", what, got=", ".join(map(str, given)) or "no rank", case=case)


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
