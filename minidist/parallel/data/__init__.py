"""Data parallelism: replicas of the model, and the gradient reducer that averages their gradients.

Public: the functions of `replicate` (equal replicas, the reducer of a configuration), `reducer.GradientReducer` and the
reducers of `simple`. Read in this order: `reducer`, `simple`, `replicate`, `buckets`.
"""
