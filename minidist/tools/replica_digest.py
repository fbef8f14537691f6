"""Replica digests: find out whether ranks that must hold equal tensors do, by comparing 64 bits instead of tensors.

A flipped bit in one replica (a cosmic ray, a failing core) crashes nothing: the replica trains on with its own numbers,
and its gradients spread into all others. So the ranks compare digests every few steps. Each rank sends 16 bytes per
set of ranks that share tensors; only if these differ, a second exchange finds the tensors and the ranks.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist.comm import Group, all_gather, all_gather_object, all_reduce, recv, send
from minidist.errors import format_ranks
from minidist.hashing import mix, mix_int, to_signed64
from minidist.tensor_bytes import tensor_bytes

CHUNK = 1 << 20  # words that are hashed at once: 24 MiB of temporary memory
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by the size of an element in bytes
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


def compute_digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return a 64-bit digest of the bits of each tensor, as int from 0 to 2**64 - 1; equal on every device.

    A tensor is read as chunks of words x_i of at most 32 bits. Each word gives y_i = f(w_i x_i mod 2**64), with a
    pseudo-random odd weight w_i and f(z) = z xor (z >> 32). The y_i of each chunk are summed modulo 2**64; the sums are
    mixed and summed again. A change within one word always changes the digest, because all these steps are bijections.
    Changes of several words cancel with a probability of about 2**-64. Without f, two flipped signs would cancel with a
    probability of 2**-33: a flipped sign changes w_i x_i by 2**31 w_i.
    """
    weights: dict[torch.device, Tensor] = {}
    sums: dict[torch.device, list[Tensor]] = defaultdict(list)
    chunks_of = []
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
        device = words.device
        if len(weights.get(device, ())) < min(len(words), CHUNK):
            count = min(2 * len(words), CHUNK)  # twice as many: few tensors need more after it
            weights[device] = mix(torch.arange(count, device=device)).bitwise_or_(1)
        chunks_of.append((device, -(-len(words) // CHUNK)))
        for chunk in words.split(CHUNK) if len(words) else ():
            hashed = chunk.to(torch.int64).mul_(weights[device][: len(chunk)])
            hashed ^= (hashed >> 32).bitwise_and_(_MASK32)
            sums[device].append(hashed.sum())
    values = {device: iter(torch.stack(of_device).tolist()) for device, of_device in sums.items()}
    return [
        sum(mix_int((next(values[device]) + chunk) & _MASK64) for chunk in range(count)) & _MASK64
        for device, count in chunks_of
    ]


@dataclass(frozen=True, eq=False)
class ReplicatedTensor:
    """A tensor that must have the same bits on the global ranks `ranks` (ascending, this rank included).

    name: kind and global name, as in a checkpoint: `optimizer.exp_avg/model.norm.weight`.
    """

    name: str
    tensor: Tensor
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor that should be equal on the global ranks `replicas`, and is not.

    name: as in `ReplicatedTensor`. wrong_ranks: those that differ from the majority; all replicas if no value is
    held by more than half of them. healthy_rank: one rank of the majority; None if there is no majority.
    """

    name: str
    replicas: tuple[int, ...]
    wrong_ranks: tuple[int, ...]
    healthy_rank: int | None


class ReplicaCheck:
    """Compares the replicas of tensors, and overwrites replicas that differ from the majority.

    group: all ranks. last_equal_step: the step of the last check that found no difference; at first, `step`.
    """

    def __init__(self, group: Group, step: int = 0):
        self._group, self.last_equal_step = group, step

    def find_differences(self, step: int, tensors: Iterable[ReplicatedTensor]) -> list[ReplicaDifference]:
        """Collective: compare the replicas of all tensors; return those that differ, the same list on every rank.

        step: number of completed steps. tensors: the replicated tensors of this rank.
        """
        replicated = [tensor for tensor in tensors if len(tensor.ranks) > 1]
        digests: dict[int, dict[str, int]] = defaultdict(dict)  # of this rank: by set of ranks, then by name
        for entry, digest in zip(replicated, compute_digests(entry.tensor for entry in replicated), strict=True):
            digests[_hash_text(str(entry.ranks))][entry.name] = digest
        seen: dict[int, set[int]] = defaultdict(set)
        for key, digest in self._gather_digests({key: _combine_digests(of_key) for key, of_key in digests.items()}):
            seen[key].add(digest)
        unequal = {key for key, values in seen.items() if len(values) > 1}
        if not unequal:
            self.last_equal_step = step
            return []
        details = all_gather_object({key: digests[key] for key in unequal & digests.keys()}, self._group)
        return _find_differing_tensors(details)

    def repair(self, differences: Sequence[ReplicaDifference], tensors: Iterable[ReplicatedTensor]) -> None:
        """Collective: overwrite every wrong replica with a healthy one. `healthy_rank` must not be None."""
        own, rank = {entry.name: entry.tensor.detach() for entry in tensors}, self._group.world.rank
        for difference in differences:
            for wrong in difference.wrong_ranks:
                if rank not in (wrong, difference.healthy_rank):
                    continue
                # Bytes: not every backend sends every dtype. The peers' numbers in a group of all ranks are global.
                tensor, device = own[difference.name], self._group.world.control_device
                copy = tensor_bytes(tensor.to(device))
                if rank == difference.healthy_rank:
                    send(copy, wrong, self._group)
                else:
                    copy = torch.empty_like(copy)
                    recv(copy, difference.healthy_rank, self._group)
                    tensor.copy_(copy.view(tensor.dtype).view(tensor.shape))

    def _gather_digests(self, digests: dict[int, int]) -> list[list[int]]:
        """Collective: gather the pairs (set of ranks, digest) of all ranks."""
        device = self._group.world.control_device
        width = torch.tensor([len(digests)], device=device)
        all_reduce(width, self._group, "max", async_op=True).wait(host=True)
        if not int(width):
            return []
        rows = torch.zeros(int(width), 2, dtype=torch.int64)
        for at, pair in enumerate(digests.items()):
            rows[at] = torch.tensor([to_signed64(value) for value in pair])
        table = torch.empty(self._group.size * rows.numel(), dtype=torch.int64, device=device)
        all_gather(table, rows.view(-1).to(device), self._group, async_op=True).wait(host=True)
        pairs = [[value & _MASK64 for value in pair] for pair in table.view(-1, 2).tolist()]
        return [pair for pair in pairs if pair != [0, 0]]


def format_differences(differences: Sequence[ReplicaDifference], limit: int = 4) -> str:
    """Return text for a message: which ranks differ, and in which tensors. limit: how many of each to list."""
    names: dict[tuple, list[str]] = defaultdict(list)
    for difference in differences:
        names[difference.wrong_ranks, difference.replicas, difference.healthy_rank].append(difference.name)
    parts = []
    for (wrong, replicas, healthy), of_ranks in names.items():
        others = f"the other replicas ({format_ranks(set(replicas) - set(wrong))})"
        how = "differ from each other" if healthy is None else f"not equal to {others}"
        more = f" and {len(of_ranks) - limit} more" if len(of_ranks) > limit else ""
        parts.append(f"{format_ranks(wrong)} {how} in {', '.join(of_ranks[:limit])}{more}")
    return "; ".join(parts[:limit]) + (f"; and {len(parts) - limit} more" if len(parts) > limit else "")


def _find_differing_tensors(details: Sequence[dict[int, dict[str, int]]]) -> list[ReplicaDifference]:
    """Return the tensors whose digests differ between their replicas.

    details: of each rank, {set of ranks: {name: digest}}.
    """
    # details: of each rank, its digests by set of ranks and name
    found = []
    for key in sorted(set().union(*details)):
        replicas = tuple(rank for rank, of_rank in enumerate(details) if key in of_rank)
        for name in dict.fromkeys(name for rank in replicas for name in details[rank][key]):
            column = {rank: details[rank][key].get(name) for rank in replicas}  # None: no such tensor there
            [(value, votes)] = Counter(column.values()).most_common(1)
            if votes < len(replicas):
                is_majority = 2 * votes > len(replicas) and value is not None
                right = [rank for rank in replicas if is_majority and column[rank] == value]
                wrong = tuple(rank for rank in replicas if rank not in right)
                found.append(ReplicaDifference(name, replicas, wrong, right[0] if right else None))
    return found


def _combine_digests(digests: dict[str, int]) -> int:
    """Return one 64-bit digest of several, by name; independent of their order."""
    return sum(mix_int(_hash_text(name) ^ mix_int(digest)) for name, digest in digests.items()) & _MASK64


def _hash_text(text: str) -> int:
    """Return a 64-bit hash of a text, equal in all processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
