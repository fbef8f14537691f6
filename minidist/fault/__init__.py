"""Fault tolerance: what survives when a process does not.

layout      pieces of global tensors, and which of them a rank must read
index       checkpoint.json: what a checkpoint holds, and whether its files are still what was written
folders     the folder of checkpoints: which are complete, which is the latest, which may go
agree       one rank failed, so all did
checkpoint  save and load, on one rank or many, from any layout into any other
signals     the request to stop, which waits for the end of a step
"""
