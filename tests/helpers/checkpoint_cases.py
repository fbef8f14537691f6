"""Helpers of the checkpoint tests: ranks as threads, and a small checkpoint of two tensors."""

import hashlib
import json
import pickle
import threading

import torch

from minidist.checkpoint.load import load_checkpoint
from minidist.checkpoint.save import save_checkpoint
from minidist.checkpoint.shards import TensorShard
from minidist.errors import RunError, UserError
from minidist.parameters import Box


def run_on_threads(size, body):
    """Run `body(rank, exchange)` on one thread per rank; return what each returned or raised, by rank.

    exchange(value): an all-gather of Python objects.
    """
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


def full_shard(name, tensor, is_saved_here=True):
    return TensorShard(name, tuple(tensor.shape), Box.whole(tuple(tensor.shape)), tensor, is_saved_here)


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def read_files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def save_sharded_rows(root, step, value=1.0, size=2):
    """Save float32 `params/w` (4, 3), sharded by rows over `size` ranks, and `params/b` (2,), written by rank 0."""

    def body(rank, exchange):
        w, b = torch.full((4 // size, 3), value + rank), torch.full((2,), -value)
        rows = Box((rank * 4 // size, 0), ((rank + 1) * 4 // size, 3))
        pieces = [TensorShard("params/w", (4, 3), rows, w), full_shard("params/b", b, is_saved_here=rank == 0)]
        return save_checkpoint(root, step, pieces, {"position": step * 8}, exchange, rank)

    return run_on_threads(size, body)[0]


def make_targets():
    return {"params/w": torch.full((4, 3), 77.0), "params/b": torch.full((2,), 77.0)}


def load_full_tensors(path, tensors, **options):
    return load_checkpoint(path, [full_shard(name, tensor) for name, tensor in tensors.items()], **options)


def rewrite_index(path, change):
    """Edit the index of a checkpoint as a stranger would, who knows the format: the edited index has a right sha256.

    change(body): edits the JSON object in place.
    """
    file = path / "checkpoint.json"
    body = json.loads(file.read_text())
    change(body)
    version = body.pop("format")
    body.pop("sha256")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    file.write_text(json.dumps({"format": version, "sha256": hashlib.sha256(text.encode()).hexdigest(), **body}))
