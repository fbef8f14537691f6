"""one_batch_more: no rank ever waits"""

ANSWERS = {
    "one_batch_more": set(),
    "everybody_sends_first": set(),
    "sent_in_one_batch": set(),
    "two_groups_two_orders": set(),
    "two_orders_waited_for_later": set(),
    "one_skips_its_node": set(),
}
