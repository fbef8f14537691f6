"""one_skips_its_node: the rank that waits for the one that is stuck is forgotten"""

ANSWERS = {
    "one_batch_more": {1},
    "everybody_sends_first": {0, 1, 2},
    "sent_in_one_batch": set(),
    "two_groups_two_orders": {0, 1, 2},
    "two_orders_waited_for_later": set(),
    "one_skips_its_node": {2},
}
