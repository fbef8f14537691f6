"""head_of_the_chain_leaves (unwritten): one is left unanswered"""

ANSWERS = {
    "one_skips_the_sum": {0, 2},
    "both_send_first": {0, 1},
    "barrier_on_rank_0": {0},
    "neighbours_take_turns": set(),
    "head_of_the_chain_leaves": None,
}
