"""One replica of a data-parallel run under torchft, as in torchft's example `train_ddp.py`, on gloo.

`python -m bench recover` starts one process of this program per replica, beside torchft's lighthouse, whose address is
in TORCHFT_LIGHTHOUSE. The first argument is the number of the replica, the second the number of replicas. Each replica
takes its part of a global batch like that of minidist's run, and prints every step that the replicas have committed.

The gradients are averaged by `Manager.allreduce`, as one flat tensor. torchft 0.2.0's own `DistributedDataParallel`
also ends the replicas that are left when one dies: the communication hook has no future then (`assert fut._fut`).
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchft import Manager, Optimizer, ProcessGroupGloo

from minidist.models.config import ModelConfig
from minidist.models.transformer import Transformer

SEQ_LEN, GLOBAL_BATCH = 64, 16
_TIMEOUT = timedelta(seconds=30)


def main(replica: int, replicas: int) -> None:
    """Train replica number `replica` of `replicas`, one process each, until the process is killed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = ModelConfig(hidden_size=64, intermediate_size=128, num_layers=2)
    model = Transformer(config)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1, timeout=_TIMEOUT, replica_id=f"replica_{replica}",
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
    )  # fmt: skip
    optimizer = Optimizer(manager, optimizer)
    draw = torch.Generator().manual_seed(replica)
    while True:
        tokens = torch.randint(config.vocab_size, (GLOBAL_BATCH // replicas, SEQ_LEN + 1), generator=draw)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = parameters_to_vector(gradients)
        manager.allreduce(flat).wait()
        vector_to_parameters(flat, gradients)
        optimizer.step()
        print(f"step {manager.current_step()} replicas {manager.num_participants()}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
