"""Everybody minus those that return."""

RANKS = {
    "one_skips_the_sum": (3, {1}),
    "both_send_first": (2, set()),
    "barrier_on_rank_0": (3, {1, 2}),
    "neighbours_take_turns": (4, {0, 1, 2, 3}),
    "head_of_the_chain_leaves": (4, {0}),
}
ANSWERS = {name: set(range(size)) - returned for name, (size, returned) in RANKS.items()}
