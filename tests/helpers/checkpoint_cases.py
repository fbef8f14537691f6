"""What the tests of checkpoints share: ranks as threads, and a small checkpoint of two tensors."""

import pickle
import threading

import torch

from minidist.errors import RunError, UserError
from minidist.fault.checkpoint import load_checkpoint, save_checkpoint
from minidist.fault.shards import TensorShard
from minidist.parameters import Box


def on_ranks(size, body):
    """Run `body(rank, exchange)` on threads that can exchange values; what each returned or raised, in order."""
    barrier, slots, outcomes = threading.Barrier(size, timeout=20), [None] * size, [None] * size

    def rank_thread(rank):
        def exchange(value):
            slots[rank] = pickle.dumps(value)  # as over a network: no object is shared
            barrier.wait()
            values = [pickle.loads(slot) for slot in slots]
            barrier.wait()
            return values

        try:
            outcomes[rank] = body(rank, exchange)
        except BaseException as error:
            outcomes[rank] = error
            if not isinstance(error, (UserError, RunError)):
                barrier.abort()

    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def whole(name, tensor, writes=True):
    return TensorShard(name, tuple(tensor.shape), Box.whole(tuple(tensor.shape)), tensor, writes)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def save_rows(root, step, value=1.0, size=2):
    """`params/w` (4, 3) and `params/b` (2,), of float32 and cut into rows over the ranks."""

    def body(rank, exchange):
        w, b = torch.full((4 // size, 3), value + rank), torch.full((2,), -value)
        rows = Box((rank * 4 // size, 0), ((rank + 1) * 4 // size, 3))
        pieces = [TensorShard("params/w", (4, 3), rows, w), whole("params/b", b, writes=rank == 0)]
        return save_checkpoint(root, step, pieces, {"position": step * 8}, exchange, rank)

    return on_ranks(size, body)[0]


def targets():
    return {"params/w": torch.full((4, 3), 77.0), "params/b": torch.full((2,), 77.0)}


def load_all(path, tensors, **options):
    return load_checkpoint(path, [whole(name, tensor) for name, tensor in tensors.items()], **options)
