"""The bytes that this process sent over TCP, as the kernel counts them: an independent check of the meter."""

import os
import socket
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence

# Linux, struct tcp_info of linux/tcp.h: places of tcpi_notsent_bytes, and of tcpi_bytes_sent with tcpi_bytes_retrans.
_NOT_SENT_AT, _SENT_AT, _BYTES = 144, 200, 232

Connection = tuple[int, int]  # this process's port and the other end's


def count_tcp_bytes_sent() -> int:
    """Return how many bytes this process has written to the TCP connections that it has open now, since they opened.

    The counters of the loopback interface would include other processes. Take the difference of two calls, and close no
    connection in between. Raises OSError on systems other than Linux 4.19 or later.
    """
    return sum(count_tcp_bytes_by_connection().values())


def count_tcp_bytes_by_connection() -> dict[Connection, int]:
    """Return the bytes of `count_tcp_bytes_sent` for each open connection: {(own port, port of the other end): bytes}.

    Raises OSError on systems other than Linux 4.19 or later.
    """
    counts: dict[Connection, int] = defaultdict(int)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if not _is_socket(fd):
            continue
        connection = socket.socket(fileno=fd)
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
                (waiting,) = struct.unpack_from("<I", info, _NOT_SENT_AT)
                sent, again = struct.unpack_from("<QQ", info, _SENT_AT)
                counts[_find_ports(connection)] += sent - again + waiting
        finally:
            connection.detach()  # do not close the owner's descriptor
    return dict(counts)


def match_connections(counts_by_rank: Sequence[Mapping[Connection, int]]) -> list[list[int]]:
    """Return the bytes that each rank of one machine sent to each other rank, one row per sender.

    counts_by_rank: `count_tcp_bytes_by_connection()` of each rank, or differences of it, in rank order. A connection
    between two ranks has one's ports in reverse order on the other; connections to other processes are left out.
    """
    owners = {ports: rank for rank, counts in enumerate(counts_by_rank) for ports in counts}
    matrix = [[0] * len(counts_by_rank) for _ in counts_by_rank]
    for rank, counts in enumerate(counts_by_rank):
        for (own_port, peer_port), count in counts.items():
            if (peer := owners.get((peer_port, own_port))) is not None:
                matrix[rank][peer] += count
    return matrix


def _find_ports(connection: socket.socket) -> Connection:
    """Return the ports of both ends of a connection; 0 for the other end of a socket that only listens."""
    try:
        return connection.getsockname()[1], connection.getpeername()[1]
    except OSError:
        return connection.getsockname()[1], 0


def _is_socket(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:  # the descriptor of the directory that was just listed
        return False
