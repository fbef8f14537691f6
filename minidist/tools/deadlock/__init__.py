"""Rank status in shared memory, and deadlock detection from the status of all ranks.

`status_page` is one rank's status, readable by other processes; `detector` decides from the statuses of all ranks;
`status_report` words them; `hang` finds ranks that are stopped or compute for ever while others wait. `watchdog` does
all of it for ranks that no parent process watches: they exchange `facts`, and one of them is the `leader`. `nccl_rules`
checks the recorded operations of a run against the ordering rules of NCCL. `caller` finds the line that waits.
"""
