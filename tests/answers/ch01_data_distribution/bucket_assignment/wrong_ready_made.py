"""every_name_once: calls torch's own"""

import torch
import torch.distributed as dist


def assign(sizes, limit, first=None):
    names = list(sizes)
    tensors = [torch.empty(sizes[name], dtype=torch.uint8) for name in names]
    cuts, _ = dist._compute_bucket_assignment_by_size(tensors, [first or limit, limit])
    return [[names[i] for i in cut] for cut in cuts]
