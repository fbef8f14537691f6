"""The same ranks as lists, tuples and ranges."""

ANSWERS = {
    "one_batch_more": [1],
    "everybody_sends_first": range(3),
    "sent_in_one_batch": [],
    "two_groups_two_orders": (2, 1, 0),
    "two_orders_waited_for_later": (),
    "one_skips_its_node": [2, 0],
}
