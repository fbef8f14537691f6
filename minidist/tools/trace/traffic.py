"""The traffic matrix: bytes that each rank sent to each other rank, from the records of all ranks' traffic meters."""

from collections.abc import Iterable, Sequence

from minidist.comm.meter import Record


def traffic_matrix(records_by_rank: Sequence[Iterable[Record]]) -> list[list[int]]:
    """Return the matrix whose entry [i][j] is the number of bytes that rank i sent to rank j.

    records_by_rank: for every rank, in rank order, the records of its `Meter`. Bytes of sends are counted; bytes of
    collectives are modelled by the algorithm that the record names.
    """
    records = [list(of_rank) for of_rank in records_by_rank]
    size = max([len(records), *(1 + max(record.ranks) for of_rank in records for record in of_rank)])
    matrix = [[0] * size for _ in range(size)]
    by_key = {(r.group_name, r.ranks, r.seq, r.name, rank): r for rank, of_rank in enumerate(records) for r in of_rank}
    for rank, of_rank in enumerate(records):
        for record in of_rank:
            for receiver, count in _list_receivers(record, rank, by_key):
                matrix[rank][receiver] += count
    return matrix


def _list_receivers(record: Record, rank: int, by_key: dict) -> list[tuple[int, int]]:
    """Return (receiver, bytes) of everything that `rank` sent in this operation; ranks are global."""
    ranks, sent = record.ranks, record.wire_bytes
    if not sent:
        return []
    if record.peer is not None:
        return [(record.peer, sent)]
    group_rank, size = ranks.index(rank), len(ranks)
    others = [r for r in ranks if r != rank]
    if record.algorithm == "ring":
        return [(ranks[(group_rank + 1) % size], sent)]
    if record.algorithm == "binomial tree":
        root = _find_root(record, by_key)
        relative = (group_rank - root) % size
        if record.name == "reduce":
            return [(ranks[(relative - (relative & -relative) + root) % size], sent)]
        children = [relative + (1 << k) for k in range(size.bit_length()) if (1 << k) > relative]
        children = [ranks[(child + root) % size] for child in children if child < size]
        return [(child, sent // len(children)) for child in children]
    if record.name == "gather":
        return [(ranks[_find_root(record, by_key)], sent)]
    return [(other, sent // len(others)) for other in others]  # scatter; all_to_all, in equal parts


def _find_root(record: Record, by_key: dict) -> int:
    """Return the group rank of an operation's root: the rank that sent the most bytes in a broadcast, else nothing."""
    sent = []
    for rank in record.ranks:
        other = by_key.get((record.group_name, record.ranks, record.seq, record.name, rank))
        sent.append(other.wire_bytes if other else 0)
    return sent.index(max(sent)) if record.name == "broadcast" else sent.index(min(sent))
