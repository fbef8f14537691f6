"""both_send_first: the first send is thought to go through"""

ANSWERS = {
    "one_skips_the_sum": {0, 2},
    "both_send_first": {1},
    "barrier_on_rank_0": {0},
    "neighbours_take_turns": set(),
    "head_of_the_chain_leaves": {1, 2, 3},
}
