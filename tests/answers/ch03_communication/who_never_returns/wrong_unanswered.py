"""two_groups_two_orders (unwritten): one is left unanswered"""

ANSWERS = {
    "one_batch_more": {1},
    "everybody_sends_first": {0, 1, 2},
    "sent_in_one_batch": set(),
    "two_groups_two_orders": None,
    "two_orders_waited_for_later": set(),
    "one_skips_its_node": {0, 2},
}
