"""Consistency: training whose replicas do not hold equal parameters in every step.

Public: the functions and classes of `simple`, `merge.ReplicaMerger`, `central.CentralReducer`. Read in this order:

simple      a central server, asynchronous workers with bounded staleness, local steps and DiLoCo's outer step
central     the central server as a gradient reducer of the trainer
merge       local SGD, DiLoCo and gossip for replicas of any layout

`minidist.tools.consistency` runs the workers of `simple` on a virtual clock.
"""
