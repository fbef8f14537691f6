"""Fault tolerance: checkpoints that any layout can load, and the request to stop.

Public: `checkpoint.save` and `checkpoint.load`, `folders.latest`, `signals.StopRequest`. Read in this order:

layout      pieces of global tensors, and which of them a rank must read
index       checkpoint.json: the contents of a checkpoint, and whether its files are intact
folders     the folder of checkpoints: which are complete, which is the latest, which may be deleted
agree       an error on one rank becomes an error on all
checkpoint  save and load, on one rank or many, from any layout into any other
signals     the request to stop, which takes effect at the end of a step
"""
