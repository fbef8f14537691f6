"""`minidist simulate`: the timeline of a pipeline schedule, its bubble and its peak of micro-batches in flight.

Read in this order: `check` (proves that a schedule does not deadlock), `timeline` (the simulation), `draw` (as text and
as a figure), `command`. `context_balance` counts the attention scores of each rank under context parallelism, and
`failures` simulates a run on machines that fail.
"""
