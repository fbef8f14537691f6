"""one_batch_more: the ranks that have no third batch are said to wait for it, and they have long returned"""

ANSWERS = {
    "one_batch_more": {0, 2},
    "everybody_sends_first": {0, 1, 2},
    "sent_in_one_batch": set(),
    "two_groups_two_orders": {0, 1, 2},
    "two_orders_waited_for_later": set(),
    "one_skips_its_node": {0, 2},
}
