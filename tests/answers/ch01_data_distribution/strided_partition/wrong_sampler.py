"""any_sizes: torch's sampler is asked"""

import numpy as np
from torch.utils.data import DistributedSampler


def strided(n, world_size, rank):
    return np.array(list(DistributedSampler(range(n), world_size, rank, shuffle=False)), dtype=np.int64)
