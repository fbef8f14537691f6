"""one_skips_the_sum: the rank that left the operation out is said to wait, and it has long returned"""

ANSWERS = {
    "one_skips_the_sum": {1},
    "both_send_first": {0, 1},
    "barrier_on_rank_0": {0},
    "neighbours_take_turns": set(),
    "head_of_the_chain_leaves": {1, 2, 3},
}
