"""Tensor parallelism: every operator of a block sharded over the ranks of one group (Shoeybi et al. 2019, Megatron-LM).

Public: the function of `split` that shards a model. Read in this order: `simple` (everything in one file), `operators`
(the collectives on entry to and exit from the parallel region), `linear`, `vocabulary`, `split`.
"""
