"""Rank status in shared memory, and deadlock detection from the status of all ranks."""
