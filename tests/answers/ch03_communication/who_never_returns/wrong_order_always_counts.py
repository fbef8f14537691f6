"""two_orders_waited_for_later: order counts within a group; what is begun in two groups is independent of each other"""

ANSWERS = {
    "one_batch_more": {1},
    "everybody_sends_first": {0, 1, 2},
    "sent_in_one_batch": set(),
    "two_groups_two_orders": {0, 1, 2},
    "two_orders_waited_for_later": {0, 1, 2},
    "one_skips_its_node": {0, 2},
}
