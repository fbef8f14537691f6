"""Data parallelism: replicas of the model, and the gradient reducer that sums their gradients.

The sum is the gradient of one process, since each loss was divided by the token count of the global batch.

Public: the functions of `replicate` (equal replicas, the reducer of a configuration), `reducer.GradientReducer` and the
reducers of `naive` and `buckets`. Read in this order: `reducer`, `naive`, `replicate`, `buckets`.
"""
