"""Pipelines: schedules as data, and what checks, times and draws them. Nothing here needs torch."""
