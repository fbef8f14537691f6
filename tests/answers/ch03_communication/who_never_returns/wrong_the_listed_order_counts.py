"""sent_in_one_batch: the rank that lists its transfers the other way round is thought to hang"""

ANSWERS = {
    "one_batch_more": {1},
    "everybody_sends_first": {0, 1, 2},
    "sent_in_one_batch": {1},
    "two_groups_two_orders": {0, 1, 2},
    "two_orders_waited_for_later": set(),
    "one_skips_its_node": {0, 2},
}
