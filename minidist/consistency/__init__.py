"""Consistency: training whose replicas do not hold equal parameters in every step.

`simple` is the whole idea in one file: a central server, asynchronous workers with bounded staleness, local steps and
DiLoCo's outer step. `minidist.tools.consistency.clock` runs its workers on a virtual clock.
"""
