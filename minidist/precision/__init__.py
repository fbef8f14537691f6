"""Mixed precision: the dtype of each kind of tensor, and what keeps small values from being rounded away.

Public: `policy.policy_of`, `scaler.LossScaler`. Read in this order: `policy`, `dtypes`, `scaler`, `masters` (master
weights), `rounding` (stochastic rounding).
"""
