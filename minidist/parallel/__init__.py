"""Parallelism: how the ranks of a mesh divide one training step.

data      replicas of the model, each with its own samples; gradients are summed over them
tensor    every operator of a block sharded over ranks
pipeline  stages of layers, through which micro-batches pass
context   every sequence sharded over ranks; attention exchanges keys and values

Each folder is used by `parallelize`, and independent of the others except that the pipeline feeds a gradient reducer.
"""
