"""one_skips_its_node: the pair across that is complete is said to wait as well"""

ANSWERS = {
    "one_batch_more": {1},
    "everybody_sends_first": {0, 1, 2},
    "sent_in_one_batch": set(),
    "two_groups_two_orders": {0, 1, 2},
    "two_orders_waited_for_later": set(),
    "one_skips_its_node": {0, 1, 2},
}
