"""sent_in_one_batch: every rank waits for ever, whatever it does"""

ANSWERS = {
    "one_batch_more": {0, 1, 2},
    "everybody_sends_first": {0, 1, 2},
    "sent_in_one_batch": {0, 1, 2},
    "two_groups_two_orders": {0, 1, 2},
    "two_orders_waited_for_later": {0, 1, 2},
    "one_skips_its_node": {0, 1, 2, 3},
}
