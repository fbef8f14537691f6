"""neighbours_take_turns: blocking sends are thought to wait for ever, also when somebody receives"""

ANSWERS = {
    "one_skips_the_sum": {0, 2},
    "both_send_first": {0, 1},
    "barrier_on_rank_0": {0},
    "neighbours_take_turns": {0, 2},
    "head_of_the_chain_leaves": {1, 2, 3},
}
