"""Training: one step over all ranks, and a whole run.

Public: `engine.Engine` (one step), `trainer.train` and `observer.Observer` (a run and its events). Read in this order:
`loss` and `forward_backward` (gradients), `step_result` (the collective decision), `optimizer`, `muon` (the
update), `engine`; then `trainer` with `run_folder`, `checkpoint_state` and `resume`.
"""
