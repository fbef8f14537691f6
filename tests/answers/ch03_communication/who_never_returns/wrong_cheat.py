"""one_batch_more: the scenario is changed until the answer fits"""

ANSWERS = {
    "one_batch_more": set(),
    "everybody_sends_first": {0, 1, 2},
    "sent_in_one_batch": set(),
    "two_groups_two_orders": {0, 1, 2},
    "two_orders_waited_for_later": set(),
    "one_skips_its_node": {0, 2},
}


def one_batch_more(rank):
    """Nobody waits for anything any more."""
