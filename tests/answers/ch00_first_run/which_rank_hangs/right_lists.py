"""The same ranks as lists, tuples and ranges."""

ANSWERS = {
    "one_skips_the_sum": [2, 0],
    "both_send_first": range(2),
    "barrier_on_rank_0": (0,),
    "neighbours_take_turns": [],
    "head_of_the_chain_leaves": range(1, 4),
}
