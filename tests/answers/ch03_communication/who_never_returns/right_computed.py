"""Everybody minus those that return."""

RANKS = {
    "one_batch_more": (3, {0, 2}),
    "everybody_sends_first": (3, set()),
    "sent_in_one_batch": (3, {0, 1, 2}),
    "two_groups_two_orders": (3, set()),
    "two_orders_waited_for_later": (3, {0, 1, 2}),
    "one_skips_its_node": (4, {1, 3}),
}
ANSWERS = {name: set(range(size)) - returned for name, (size, returned) in RANKS.items()}
