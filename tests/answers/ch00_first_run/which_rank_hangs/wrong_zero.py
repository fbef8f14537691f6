"""both_send_first: no rank ever waits"""

ANSWERS = {
    "one_skips_the_sum": set(),
    "both_send_first": set(),
    "barrier_on_rank_0": set(),
    "neighbours_take_turns": set(),
    "head_of_the_chain_leaves": set(),
}
