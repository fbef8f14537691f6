"""Whether processes of this machine can reach each other over its loopback interface. Needs no torch."""

import socket

from minidist.errors import UserError

_CONNECT_S = 2.0


def check_loopback(ranks: int) -> None:
    """Raise UserError if a connection to 127.0.0.1 fails, as in a container whose loopback interface is down.

    torch would try again for minutes, and print C++ stack traces. ranks: the number of ranks that need it.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _CONNECT_S).close()
    except OSError as error:
        raise UserError(
            f"{ranks} ranks on this machine need its loopback interface, and 127.0.0.1 cannot be reached "
            f"({error.strerror or error}): bring it up with `ip link set lo up`, or give --ranks 1."
        ) from None
