"""Mixed precision: the dtype of each kind of tensor, loss scaling, master weights and stochastic rounding.

Public: `policy.resolve_policy`, `scaler.LossScaler`. Read in this order: `simple` (all of it in one file, also
recomputation), `policy`, `dtypes`, `scaler`, `masters`, `rounding`.
"""
