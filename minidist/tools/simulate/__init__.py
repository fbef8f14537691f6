"""`minidist simulate`: the timeline of a pipeline schedule, its bubble and its peak of micro-batches in flight.

Read in this order: `timeline` (the simulation), `draw` (as text and as a figure), `command`. `context_balance` counts
the attention scores of each rank under context parallelism, and `failures` simulates a run on machines that fail.
"""
