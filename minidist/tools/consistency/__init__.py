"""Synchronization modes, measured on live ranks, and simulated in one process.

`clock` runs the workers and the server of `minidist.simple.consistency`, `virtual_run` trains a model with them, and
`delay` compares the largest stable learning rate of delayed gradient descent with theory. `sharded` has a server per
shard, `drift` measures how far replicas are apart, `rounds` times local steps, `grid` reads the stored runs of DiLoCo,
and `pictures` draws for chapter 04.
`command` is `minidist consistency`, which measures all modes side by side (`comparison`).
"""
