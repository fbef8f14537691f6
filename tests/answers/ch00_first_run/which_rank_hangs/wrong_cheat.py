"""one_skips_the_sum: the scenario is changed until the answer fits"""

ANSWERS = {
    "one_skips_the_sum": set(),
    "both_send_first": {0, 1},
    "barrier_on_rank_0": {0},
    "neighbours_take_turns": set(),
    "head_of_the_chain_leaves": {1, 2, 3},
}


def one_skips_the_sum(rank):
    """Nobody waits for anything any more."""
