"""1F1B as a list of actions: the solution, as it stands in minidist.simple.pipeline.

The first gradient reaches stage p after the micro-batch has passed through the later stages and its gradient has come
back. Until then stage p can run n - 1 - p more forwards, and from then on it runs one backward per forward: at most n
- p micro-batches are in flight, whatever the number of micro-batches in the step. With GPipe all of them are in
flight. The bubble is the same: 1F1B saves memory, not time.

With one warm-up forward fewer the stage waits for a gradient although it has work to do; with one more it keeps an
activation longer than needed.

Usual wrong answers:
* as many forwards at the start as may be in flight, then a backward before each forward, with one more at the start
  on the last stage
* the package's own
* returns one number for all micro-batches
* runs micro-batches that are not there if there are fewer than stages
* one forward at the start on every stage but the last: right for two stages
* runs all forwards first, so that all micro-batches are in flight
* leaves out the last backwards
* each backward right after its forward, on every stage
* off by one: one forward too few at the start, so that stages wait for gradients although they have work to do
* off by one: one forward too many at the start
* as many forwards at the start on every stage as the first one needs
* counts the earlier stages in place of the later ones
* returns zeros for all numbers
"""

from minidist.simple.pipeline import Action


def one_f_one_b(num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the actions of each stage, in order; stage p of n has at most n - p micro-batches in flight."""
    schedule: list[list[Action]] = [[] for _ in range(num_stages)]
    for stage, actions in enumerate(schedule):
        # The first gradient comes back after its micro-batch has passed all later stages.
        warm_up = min(num_stages - 1 - stage, num_micro_batches)
        for i in range(num_micro_batches + warm_up):
            if i < num_micro_batches:
                actions.append(("F", i))
            if i >= warm_up:
                actions.append(("B", i - warm_up))
    return schedule
