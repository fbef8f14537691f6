"""Pipeline parallelism: schedules as data, and one executor that runs all of them.

Public: `schedules.build_schedule`, `check.check_schedule`, `executor.PipelineExecutor`. Read in this order: `actions`,
`schedules`, `check`, `action_times` and `transfers`, `split` and `balance`, `split_backward`,
`executor`.
Only `split`, `split_backward` and `executor` need torch.
"""
