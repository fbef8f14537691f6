"""Consistency: training whose replicas do not hold equal parameters in every step.

Public: the classes of all modules. Read in this order:

central       a central server as a gradient reducer of the trainer
server        the parameter server of asynchronous training, with a staleness bound
asynchronous  workers and server on live ranks, without a barrier
merge         local SGD, DiLoCo and gossip for replicas of any layout

The simple version of all of them is `minidist.simple.consistency`, whose workers `minidist.tools.consistency` runs on a
virtual clock.
"""
