"""barrier_on_rank_0: ranks that never come to the barrier are said to wait in it"""

ANSWERS = {
    "one_skips_the_sum": {0, 2},
    "both_send_first": {0, 1},
    "barrier_on_rank_0": {0, 1, 2},
    "neighbours_take_turns": set(),
    "head_of_the_chain_leaves": {1, 2, 3},
}
