"""Send and receive: one connection per (peer, direction, tag), which the sender opens at its first send.

A send completes only after the receiver has posted its receive, as with gloo and nccl, so a program that deadlocks with
them deadlocks here. A small tensor is part of the first message. For a larger one the first message carries the size;
once the receiver has answered, the sender allocates memory for two chunks and fills one while the receiver reads the
other. So a transfer holds memory only while it makes progress, never while it waits for its receiver.
"""

import contextlib
import json
import socket
import struct

from torch import Tensor

from minidist.tools.shm.barrier import EAGER_MESSAGE_BYTES, GroupBarrier, ShmError, receive_after_connection_reset
from minidist.tools.shm.process_context import ProcessContext, receive_message, set_socket_timeout
from minidist.tools.shm.sizes import EAGER_BYTES, TRANSFER_CHUNK_BYTES

_PIECE = struct.Struct("<QQ")
_GO, _NO = b"+", b"!"


class Transfers:
    """The blocking point-to-point sends and receives of one process group over shared memory.

    context: the `ProcessContext` of this process. barrier: names the ranks, and knows the timeout and which ranks have
    left. tokens: `ProcessContext.token` of each group rank. name: a unique name that all ranks of the group know.
    """

    def __init__(self, context: ProcessContext, barrier: GroupBarrier, tokens: list[str], name: str):
        self._context, self._barrier, self._tokens, self._name = context, barrier, tokens, name
        self._socks: dict[tuple[str, int, int], socket.socket] = {}
        self._memories = [context.get_arena(token) for token in tokens]
        self._closed = False

    def send(self, flat: Tensor, signature: str, peer: int, tag: int) -> None:
        """Send `flat` (n,) uint8 to group rank `peer`; return when the peer has received all of it.

        signature: the tensor's dtype and number of elements as text. Raises ShmError if the receiver expects another
        size or dtype, or if the peer leaves the group or does not answer within the group's timeout.
        """
        sock = self._get_connection("send", peer, tag)
        small = flat.numel() <= EAGER_BYTES
        head = json.dumps([flat.numel(), signature.split(" ")[0], signature]).encode() + b"\n"
        what = f"send of {signature} to rank {self._barrier.ranks[peer]} (tag {tag})"
        self._send_message(sock, head + (flat.numpy().tobytes() if small else b""))
        answer = self._receive(sock, peer, what)
        if answer[:1] == _NO:
            raise ShmError(answer[1:].decode())
        if not small:
            self._send_in_chunks(flat, sock, peer, what)

    def _send_in_chunks(self, flat: Tensor, sock: socket.socket, peer: int, what: str) -> None:
        """Send a large tensor through two buffers in shared memory, which the receiver reads in turn."""
        arena, size = self._context.arena, min(flat.numel(), TRANSFER_CHUNK_BYTES)
        block = arena.allocate_transfer_buffer(2 * size)
        try:
            unread = 0
            for i, begin in enumerate(range(0, flat.numel(), size)):
                if unread == 2:
                    self._receive(sock, peer, what)
                    unread -= 1
                piece, offset = flat[begin : begin + size], block + i % 2 * size
                arena.memory[offset : offset + piece.numel()].copy_(piece)
                self._send_message(sock, _PIECE.pack(offset, piece.numel()))
                unread += 1
            for _ in range(unread):
                self._receive(sock, peer, what)
        finally:
            arena.free_transfer_buffer(block, 2 * size)

    def recv(self, flat: Tensor, signature: str, peer: int, tag: int) -> None:
        """Receive into `flat` (n,) uint8 from group rank `peer`; return when all of it has arrived.

        signature: the tensor's dtype and number of elements as text. Raises ShmError if the sender sends another size
        or dtype, or if the peer leaves the group or sends nothing within the group's timeout.
        """
        sock = self._get_connection("recv", peer, tag)
        what = f"recv of {signature} from rank {self._barrier.ranks[peer]} (tag {tag})"
        head, _, data = self._receive(sock, peer, what).partition(b"\n")
        size, dtype, peer_signature = json.loads(head)
        if [size, dtype] != [flat.numel(), signature.split(" ")[0]]:
            own_rank, other = self._barrier.ranks[self._barrier.rank], self._barrier.ranks[peer]
            text = (
                f"rank {other} sends {peer_signature} to rank {own_rank}, which receives {signature}: they must agree "
                f"in number of elements and dtype (tag {tag} of {self._barrier})"
            )
            self._send_message(sock, _NO + text.encode())
            raise ShmError(text)
        if size <= EAGER_BYTES:
            flat.numpy()[:] = memoryview(data)
            self._send_message(sock, _GO)
            return
        self._send_message(sock, _GO)
        memory, begin = self._memories[peer], 0
        while begin < size:
            offset, length = _PIECE.unpack(self._receive(sock, peer, what))
            flat[begin : begin + length].copy_(memory[offset : offset + length])
            self._send_message(sock, _GO)
            begin += length

    def _get_connection(self, direction: str, peer: int, tag: int) -> socket.socket:
        """Return the socket of a (direction, peer, tag); the first call connects. Raises ShmError."""
        key = (direction, peer, tag)
        if key not in self._socks:
            if direction == "send":
                self._check_peer_open(peer)
                try:
                    sock, _ = self._context.connect(self._tokens[peer], (self._name, "tag", self._barrier.rank, tag))
                except OSError as error:
                    raise ShmError(f"{self._explain_closed_connection(peer)}: no connection ({error})") from None
            else:
                name = (self._name, "tag", peer, tag)
                arrived = self._context.wait_for_connection(
                    name, lambda: self._is_peer_open(peer), self._barrier.timeout_s
                )
                if arrived is None:
                    self._check_peer_open(peer)
                    raise ShmError(
                        f"rank {self._barrier.ranks[peer]} did not send under tag {tag} of {self._barrier} in time"
                    )
                sock = arrived[0]
            set_socket_timeout(sock, self._barrier.timeout_s)
            self._socks[key] = sock
            # The peer may have left while we connected, when `disconnect_peer` did not know this connection.
            self._check_peer_open(peer)
        return self._socks[key]

    def _is_peer_open(self, peer: int) -> bool:
        """Return whether this group and `peer` still communicate: neither was closed or has ended."""
        return not self._closed and peer not in self._barrier.departure_reasons

    def _check_peer_open(self, peer: int) -> None:
        """Raise ShmError if this group was destroyed or `peer` has left it."""
        if not self._is_peer_open(peer):
            raise ShmError(self._explain_closed_connection(peer))

    def _explain_closed_connection(self, peer: int) -> str:
        """Return why nothing can be exchanged with `peer`, as text for a ShmError."""
        if self._closed:
            return "the group was destroyed"
        return (
            self._barrier.departure_reasons.get(peer)
            or f"rank {self._barrier.ranks[peer]} has left {self._barrier} or ended"
        )

    def _send_message(self, sock: socket.socket, message: bytes) -> None:
        """Send a message; ignore that the peer has closed, which the next receive reports."""
        # If the peer has gone, waiting for its next message raises the error that says so.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.send(message)

    def _receive(self, sock: socket.socket, peer: int, what: str) -> bytes:
        """Wait for the next message of `peer`. what: the transfer, as text for the ShmError if none comes."""
        try:
            received = receive_message(sock, EAGER_MESSAGE_BYTES)
        except BlockingIOError:
            raise ShmError(
                f"{what} of {self._barrier}: rank {self._barrier.ranks[peer]} did not come in time"
            ) from None
        except ConnectionResetError:
            received = receive_after_connection_reset(sock)
        if not received:
            raise ShmError(f"{self._explain_closed_connection(peer)} ({what})")
        return received

    def disconnect_peer(self, peer: int) -> None:
        """Note that `peer` has left the group: operations that send to it or receive from it fail from now on.

        What `peer` sent before it left is still received.
        """
        for (_, other, _), sock in list(self._socks.items()):
            if other == peer:
                _shut_down(sock)
        with self._context.changed:
            self._context.changed.notify_all()

    def fail_all(self) -> None:
        """Make all sends and receives, in flight and later, fail with ShmError: the group is being destroyed."""
        self._closed = True
        for sock in self._socks.values():
            _shut_down(sock)
        with self._context.changed:
            self._context.changed.notify_all()

    def close_sockets(self) -> None:
        """Close all connections. Call this after `fail_all`, when no thread sends or receives any more."""
        for sock in self._socks.values():
            sock.close()
        self._socks.clear()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
