"""The traffic matrix: bytes that each rank sent to each other rank, from the meters of all ranks."""

from collections.abc import Iterable, Sequence

from minidist.comm.meter import Record


def traffic_matrix(by_rank: Sequence[Iterable[Record]]) -> list[list[int]]:
    """The matrix whose entry [i][j] is the bytes that rank i sent to rank j.

    by_rank: the records of every rank, in rank order. Transfers are counted; collectives are modelled by the algorithm
    that the meter names (`Record.algorithm`).
    """
    records = [list(rows) for rows in by_rank]
    size = max([len(records), *(1 + max(record.ranks) for rows in records for record in rows)])
    matrix = [[0] * size for _ in range(size)]
    whole = {(r.use, r.ranks, r.seq, r.name, rank): r for rank, rows in enumerate(records) for r in rows}
    for rank, rows in enumerate(records):
        for record in rows:
            for receiver, count in _receivers(record, rank, whole):
                matrix[rank][receiver] += count
    return matrix


def _receivers(record: Record, rank: int, whole: dict) -> list[tuple[int, int]]:
    """(receiver, bytes) of what `rank` sent in this operation."""
    ranks, sent = record.ranks, record.wire_bytes
    if not sent:
        return []
    if record.peer is not None:
        return [(record.peer, sent)]
    at, size = ranks.index(rank), len(ranks)
    others = [r for r in ranks if r != rank]
    if record.algorithm == "ring":
        return [(ranks[(at + 1) % size], sent)]
    if record.algorithm == "binomial tree":
        root = _root(record, whole)
        relative = (at - root) % size
        if record.name == "reduce":
            return [(ranks[(relative - (relative & -relative) + root) % size], sent)]
        fed = [relative + (1 << k) for k in range(size.bit_length()) if (1 << k) > relative]
        fed = [ranks[(child + root) % size] for child in fed if child < size]
        return [(child, sent // len(fed)) for child in fed]
    if record.name == "gather":
        return [(ranks[_root(record, whole)], sent)]
    return [(other, sent // len(others)) for other in others]  # scatter; all_to_all, in equal parts


def _root(record: Record, whole: dict) -> int:
    """The group rank of an operation's root, which sends most in a broadcast and nothing in other operations."""
    sent = []
    for rank in record.ranks:
        other = whole.get((record.use, record.ranks, record.seq, record.name, rank))
        sent.append(other.wire_bytes if other else 0)
    return sent.index(max(sent)) if record.name == "broadcast" else sent.index(min(sent))
