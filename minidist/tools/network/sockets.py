"""The bytes that this process sent over TCP, as the kernel counts them: an independent check of the meter."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

# Linux, struct tcp_info of linux/tcp.h: places of tcpi_notsent_bytes, and of tcpi_bytes_sent with tcpi_bytes_retrans.
_NOT_SENT_AT, _SENT_AT, _BYTES = 144, 200, 232


Address = tuple[str, int]  # host and port


def count_tcp_bytes_sent() -> int:
    """Return how many bytes this process has written to the TCP connections that it has open now, since they opened.

    The counters of the loopback interface would include other processes. Take the difference of two calls, and close no
    connection in between. Raises OSError on systems other than Linux 4.19 or later.
    """
    return sum(_count_bytes(connection) for connection in _open_tcp_sockets())


def count_tcp_bytes_by_connection() -> dict[tuple[Address, Address], int]:
    """Return {(own address, peer's address): bytes written} of the TCP connections that `count_tcp_bytes_sent` adds up.

    Raises OSError on systems other than Linux 4.19 or later.
    """
    counts = {}
    for connection in _open_tcp_sockets():
        with contextlib.suppress(OSError):  # not connected: it listens, or its peer has died
            addresses = connection.getsockname()[:2], connection.getpeername()[:2]
            counts[addresses] = _count_bytes(connection)
    return counts


def bytes_between_ranks(counts_by_rank: Sequence[Mapping[tuple[Address, Address], int]]) -> list[list[int]]:
    """Return how many bytes each rank has sent to each other rank: row r is what rank r sent, by receiver.

    counts_by_rank: of each rank of one machine, the result of `count_tcp_bytes_by_connection`, or the difference of two
    results. A connection counts if both of its ends are among these ranks; one to the rendezvous store, say, does not.
    """
    # An address alone does not name a rank: two processes may have the same port for connections to different peers.
    owners = {ends: rank for rank, counts in enumerate(counts_by_rank) for ends in counts}
    sent = [[0] * len(counts_by_rank) for _ in counts_by_rank]
    for rank, counts in enumerate(counts_by_rank):
        for (own, peer), num_bytes in counts.items():
            if (receiver := owners.get((peer, own))) is not None:
                sent[rank][receiver] += num_bytes
    return sent


def _open_tcp_sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets; each may be used until the next one is asked for."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if not _is_socket(fd):
            continue
        connection = socket.socket(fileno=fd)
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection
        finally:
            connection.detach()  # do not close the owner's descriptor


def _count_bytes(connection: socket.socket) -> int:
    """Return how many bytes have been written to a connection, and not only sent to its peer."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
    (waiting,) = struct.unpack_from("<I", info, _NOT_SENT_AT)
    sent, again = struct.unpack_from("<QQ", info, _SENT_AT)
    return sent - again + waiting


def _is_socket(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:  # the descriptor of the directory that was just listed
        return False
