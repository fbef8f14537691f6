"""Tests of who_never_returns. `measured`: for each scenario, the ranks that were observed to block for ever.
`sizes`: the number of ranks of each scenario."""

from exercises.testing import expect_prediction, test


@test(points=2)
def one_batch_more(answer, measured, sizes):
    """One rank calls a collective once more than the others do."""
    expect_prediction(answer, "one_batch_more", measured["one_batch_more"], sizes["one_batch_more"])


@test(points=2)
def everybody_sends_first(answer, measured, sizes):
    """A ring in which all ranks send before they receive."""
    expect_prediction(
        answer, "everybody_sends_first", measured["everybody_sends_first"], sizes["everybody_sends_first"]
    )


@test(points=2)
def sent_in_one_batch(answer, measured, sizes):
    """A ring in which each rank starts both transfers together."""
    expect_prediction(answer, "sent_in_one_batch", measured["sent_in_one_batch"], sizes["sent_in_one_batch"])


@test(points=2)
def two_groups_two_orders(answer, measured, sizes):
    """Two groups; the ranks launch and wait for their sums in different orders."""
    expect_prediction(
        answer, "two_groups_two_orders", measured["two_groups_two_orders"], sizes["two_groups_two_orders"]
    )


@test(points=2)
def two_orders_waited_for_later(answer, measured, sizes):
    """The same orders, but each rank launches all sums before it waits for any."""
    name = "two_orders_waited_for_later"
    expect_prediction(answer, name, measured[name], sizes[name])


@test(points=2)
def one_skips_its_node(answer, measured, sizes):
    """A sum in two stages; one rank skips the first."""
    expect_prediction(answer, "one_skips_its_node", measured["one_skips_its_node"], sizes["one_skips_its_node"])
