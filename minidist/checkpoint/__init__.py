"""Checkpoints in the coordinates of global tensors, so that any layout can load them.

Public: `save.CheckpointSaver`, `save.save_checkpoint`, `load.load_checkpoint`, `folders.latest_checkpoint`. The short
version is `minidist/simple/checkpoint.py`, which saves and loads the same format. Read in this order:

shards      shards of global tensors, and which saved boxes a rank must read
index       checkpoint.json: the contents of a checkpoint, and the checksums of its files
index_validation  checks on an index from an untrusted source, before a file is opened
tensor_file, checksum  one rank's safetensors file, written and hashed in blocks
folders     the folder of checkpoints: which are complete, which is the latest, which may be deleted
save        save in the background, on one rank or many
load        load from any layout into any other
"""
