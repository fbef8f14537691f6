"""Pipeline parallelism: schedules as data, and one executor that runs all of them.

Public: `schedules.build_schedule`, `executor.PipelineExecutor`. Read first `simple`, steps of GPipe and 1F1B, then
`actions`, `schedules`, `transfers`, `split` and `balance`, `split_backward`, `executor`.
`tools/simulate/check.py` proves that a schedule does not deadlock.
"""
