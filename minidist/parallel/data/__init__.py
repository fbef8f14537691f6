"""Data parallelism: replicas of the model, and the gradient reducer that averages their gradients.

Public: the functions of `replicate` (equal replicas, the reducer of a configuration) and `reducer.GradientReducer`.
Read in this order: `replicate`, `reducer`, `buckets`.
"""
