"""Fault tolerance: checkpoints that any layout can load, and graceful stops on signals.

Public: `checkpoint.save_checkpoint` and `checkpoint.load_checkpoint`, `folders.latest_checkpoint`,
`signals.StopSignalRecorder`. Read in this order:

shards      shards of global tensors, and which saved boxes a rank must read
index       checkpoint.json: the contents of a checkpoint, and the checksums of its files
index_validation  checks on an index from a stranger, before a file is opened
folders     the folder of checkpoints: which are complete, which is the latest, which may be deleted
collective_errors  an error on one rank becomes an error on all ranks
checkpoint  save and load, on one rank or many, from any layout into any other
signals     the request to stop, which takes effect at the end of a step
"""
