"""Messages between the client, the rank server and the ranks: frames over local sockets, with file descriptors.

A frame is an 8-byte length and a body. The client and its ranks exchange pickles. The client and the server exchange
JSON, whose field "fds" is the number of file descriptors sent with the message.
"""

import json
import pickle
import socket
import struct
from collections import deque
from typing import Any

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 20
_MAX_FDS = 64


class FrameParser:
    """Splits a stream of received bytes into frames. A frame is an 8-byte length, then a body of that many bytes."""

    def __init__(self):
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Append received bytes; return the body of each frame that is now complete. Incomplete frames are kept."""
        self._bytes += data
        frames, offset = [], 0
        while len(self._bytes) - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, offset)
            end = offset + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            frames.append(bytes(memoryview(self._bytes)[offset + _LENGTH.size : end]))
            offset = end
        del self._bytes[:offset]
        return frames


class MessageSocket:
    """A socket between client and rank server, for JSON messages and file descriptors."""

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self.fds: deque[int] = deque()  # received before their message
        self._frames = FrameParser()

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a message, a dictionary that JSON can represent, and the open file descriptors `fds`. Blocks."""
        body = json.dumps({**message, "fds": len(fds)}).encode()
        data = _LENGTH.pack(len(body)) + body
        sent = socket.send_fds(self.socket, [data], list(fds)) if fds else 0
        self.socket.sendall(data[sent:])

    def receive(self) -> list[tuple[dict[str, Any], tuple[int, ...]]] | None:
        """Read from the socket once; return [(message, its file descriptors)] for each complete message.

        Blocks until some bytes arrive. Returns None if the peer has ended.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, _READ_BYTES, _MAX_FDS)
        except ConnectionError:
            return None
        self.fds.extend(fds)
        if not data:
            return None
        messages = [json.loads(frame) for frame in self._frames.feed(data)]
        return [(message, tuple(self.fds.popleft() for _ in range(message["fds"]))) for message in messages]


def send_object(sock: socket.socket, message: Any) -> None:
    """Send an object as one frame of pickled bytes; block until all bytes are in the socket."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    sock.sendall(_LENGTH.pack(len(body)))
    sock.sendall(body)


def receive_object(sock: socket.socket) -> Any:
    """Block until an object from `send_object` has arrived; return it. Raises EOFError when the peer has ended."""
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return pickle.loads(_receive_exactly(sock, length))


def _receive_exactly(sock: socket.socket, count: int) -> bytearray:
    """Block until `count` bytes have arrived; return them. Raises EOFError if the peer ends before."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = sock.recv_into(view)
        if not received:
            raise EOFError("the peer has closed the connection")
        view = view[received:]
    return data
