"""Pipeline parallelism: schedules as data, and one executor that runs all of them.

Public: `schedules.build_schedule`, `executor.PipelineExecutor`. Read in this order: `actions`,
`schedules`, `transfers`, `split` and `balance`, `split_backward`, `executor`. The short version is
`minidist.simple.pipeline`.
`tools/simulate/check.py` proves that a schedule does not deadlock.
"""
