"""neighbours_take_turns: every rank waits for ever, whatever it does"""

ANSWERS = {
    "one_skips_the_sum": {0, 1, 2},
    "both_send_first": {0, 1},
    "barrier_on_rank_0": {0, 1, 2},
    "neighbours_take_turns": {0, 1, 2, 3},
    "head_of_the_chain_leaves": {0, 1, 2, 3},
}
