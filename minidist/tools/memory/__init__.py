"""Peak memory of a rank's tensors, measured and broken down by kind (parameters, gradients, activations, ...).

Read in this order: `storages` (the peak, from torch's own allocator), `breakdown` (which kind each storage is of),
`tracker` (`minidist train --memory FILE`), `bars` (the chart).
"""
