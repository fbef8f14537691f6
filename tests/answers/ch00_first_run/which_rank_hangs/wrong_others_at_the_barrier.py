"""barrier_on_rank_0: the others are said to wait for rank 0"""

ANSWERS = {
    "one_skips_the_sum": {0, 2},
    "both_send_first": {0, 1},
    "barrier_on_rank_0": {1, 2},
    "neighbours_take_turns": set(),
    "head_of_the_chain_leaves": {1, 2, 3},
}
