"""Rank status in shared memory, and deadlock detection from the status of all ranks.

`status_page` is one rank's status, readable by other processes; `detector` decides from the statuses of all ranks;
`status_report` words them; `watchdog` does both for ranks that no parent process watches. `nccl_rules` checks the
recorded operations of a run against the ordering rules of NCCL. `caller` finds the line that waits.
"""
