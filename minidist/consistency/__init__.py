"""Consistency: training whose replicas do not hold equal parameters in every step.

Public: the functions and classes of `simple` and the classes of the other modules. Read in this order:

simple        a central server, asynchronous workers with bounded staleness, local steps and DiLoCo's outer step
central       the central server as a gradient reducer of the trainer
asynchronous  workers and server on live ranks, without a barrier
merge         local SGD, DiLoCo and gossip for replicas of any layout

`minidist.tools.consistency` runs the workers of `simple` on a virtual clock.
"""
