"""Tensor parallelism: every operator of a block cut over the ranks of one group (Megatron-LM, Shoeybi et al. 2019)."""
