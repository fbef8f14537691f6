"""Mixed precision: the dtype of each kind of tensor, loss scaling, master weights and stochastic rounding.

Public: `policy.resolve_policy`, `scaler.LossScaler`. Read in this order: `policy`, `dtypes`, `scaler`, `masters`,
`rounding`. The short version is `minidist/simple/mixed_precision.py`.
"""
