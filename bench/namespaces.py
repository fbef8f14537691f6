"""Two network namespaces with a link between them: two nodes of a cluster on one machine. Needs root, and `ip`."""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """One namespace. interface: its end of the link, with this address."""

    namespace: str
    interface: str
    address: str

    def limit_rate(self, mbit: float) -> None:
        """Let this node send at most `mbit` Mbit/s, as a link of that speed would; a send waits for at most 0.4 s."""
        shape = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", "64kb", "latency", "400ms")
        _run("tc", "-n", self.namespace, "qdisc", "add", "dev", self.interface, *shape)

    def set_link(self, state: str) -> None:
        """Take the link of this node "down", or "up" again."""
        _ip("-n", self.namespace, "link", "set", self.interface, state)


def why_impossible() -> str | None:
    """Return why this process cannot make namespaces; None if it can."""
    if shutil.which("ip") is None:
        return "there is no program 'ip'"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_nodes():
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Make two linked namespaces; remove them at the end."""
    name = uuid.uuid4().hex[:8]
    nodes = tuple(Node(f"minidist-{name}-{n}", f"link{n}", f"10.77.0.{n + 1}") for n in range(2))
    with contextlib.ExitStack() as made:
        for node in nodes:
            _ip("netns", "add", node.namespace)
            made.callback(_ip, "netns", "delete", node.namespace)
            _ip("-n", node.namespace, "link", "set", "lo", "up")
        first, second = nodes
        peer = ("type", "veth", "peer", "name", second.interface, "netns", second.namespace)
        _ip("link", "add", first.interface, "netns", first.namespace, *peer)
        for node in nodes:
            _ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", node.interface)
            node.set_link("up")
        yield nodes


def _ip(*arguments: str) -> None:
    """Run the command `ip`."""
    _run("ip", *arguments)


def _run(*command: str) -> None:
    """Run a command. Raises CalledProcessError if it fails."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
