"""Tests of who_never_returns. `measured` is the rank status recorded when the scenario of the test's name was run,
and `sizes` on how many ranks."""

from exercises.testing import predicted, test


@test(points=2)
def one_batch_more(answer, measured, sizes):
    """One rank calls a collective once more than the others."""
    predicted(answer, "one_batch_more", measured["one_batch_more"], sizes["one_batch_more"])


@test(points=2)
def everybody_sends_first(answer, measured, sizes):
    """A ring whose ranks all send before they receive."""
    predicted(answer, "everybody_sends_first", measured["everybody_sends_first"], sizes["everybody_sends_first"])


@test(points=2)
def sent_in_one_batch(answer, measured, sizes):
    """A ring whose ranks start both transfers together."""
    predicted(answer, "sent_in_one_batch", measured["sent_in_one_batch"], sizes["sent_in_one_batch"])


@test(points=2)
def two_groups_two_orders(answer, measured, sizes):
    """Two groups whose sums are waited for in another order on each rank."""
    predicted(answer, "two_groups_two_orders", measured["two_groups_two_orders"], sizes["two_groups_two_orders"])


@test(points=2)
def two_orders_waited_for_later(answer, measured, sizes):
    """The same orders, and nothing is waited for before everything has begun."""
    name = "two_orders_waited_for_later"
    predicted(answer, name, measured[name], sizes[name])


@test(points=2)
def one_skips_its_node(answer, measured, sizes):
    """A sum in two stages, whose first one rank leaves out."""
    predicted(answer, "one_skips_its_node", measured["one_skips_its_node"], sizes["one_skips_its_node"])
