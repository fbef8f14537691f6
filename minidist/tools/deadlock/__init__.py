"""Rank status in shared memory, and deadlock detection from the status of all ranks.

A rank's status says which operations it has launched on each *channel* (an ordered sequence of operations: all
collectives of a group, or all sends or all receives between one pair of ranks) and which operation it waits for.

`status_page` is one rank's status, readable by other processes; `detector` decides from the statuses of all ranks;
`status_report` formats statuses as text; `hang` finds ranks that are stopped or compute for ever while others wait.
`watchdog` does all of it for ranks that no parent process watches: they exchange `facts`, and one of them is the
`leader`. `nccl_rules` checks the recorded operations of a run against the ordering rules of NCCL. `caller` finds the
line that waits.
"""
