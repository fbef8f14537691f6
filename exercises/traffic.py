"""Records the sends and receives of an answer that implements a collective."""

from exercises.testing import Wrong, expect
from minidist.comm import all_gather_object


class TransferRecorder:
    """Records this rank's transfers inside a `with` block: `transfers`, as ("send" or "recv", peer, elements).

    Fails if the block calls a collective: the exercise asks for an algorithm built from sends and receives.
    """

    def __init__(self, network):
        self._network, self._records, self.transfers = network, [], []

    def __enter__(self) -> "TransferRecorder":
        self._before = len(self._network.records)
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:
            return
        records = self._network.records[self._before :]
        others = sorted({record.name for record in records} - {"send", "recv"})
        expect("operations called besides send and recv", others, [])
        self._records = records
        self.transfers = [(r.name, r.peer, r.payload_bytes // r.dtype.itemsize) for r in records]

    def peers(self, kind: str) -> list[int]:
        """Return the peer of every non-empty message, in launch order."""
        return [peer for name, peer, elements in self.transfers if name == kind and elements]

    def elements_sent(self) -> int:
        """Return the number of elements that this rank sent."""
        return sum(elements for name, _, elements in self.transfers if name == "send")

    def elements_received(self) -> int:
        """Return the number of elements that this rank received."""
        return sum(elements for name, _, elements in self.transfers if name == "recv")

    def gather_transfers(self) -> list[list]:
        """All-gather the transfers of every rank. Call it after the block."""
        return all_gather_object(self.transfers, self._network.group)

    def expect_ring(self, world) -> None:
        """Fail unless every rank sends to a neighbour and receives from the other, in size - 1 messages, all at once.

        A ring that runs both ways sends half of every chunk in each direction: at most twice as many messages.
        """
        to, source = sorted(set(self.peers("send"))), sorted(set(self.peers("recv")))
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        both_ways = to == source == sorted([left, right])
        if (to, source) not in (([right], [left]), ([left], [right])) and not both_ways:
            either = f"{[right]} and {[left]}, {[left]} and {[right]}, or both"
            raise Wrong("wrong", "ranks sent to and ranks received from", either, f"{to} and {source}")
        if not (both_ways and len(self.peers("send")) <= 2 * (world.size - 1)):
            expect("messages sent", len(self.peers("send")), world.size - 1)
        sends, receives = ([one for one in self._records if one.name == name] for name in ("send", "recv"))
        pairs = zip(sends, receives, strict=False)
        starts_before_receiving = all(other.waited is None or one.launched < other.waited for one, other in pairs)
        at_once = sum(all_gather_object(starts_before_receiving, self._network.group))
        if at_once < world.size:
            what = "ranks that start to send before they have received; the others wait for them"
            raise Wrong("wrong", what, f"all {world.size}", str(at_once))


def expect_done_or_refused(call, tensor, expected) -> None:
    """Fail if a collective on a tensor that is not contiguous returns and has not changed it: it worked on a copy."""
    try:
        call(tensor)
    except NotImplementedError:
        raise
    except Exception:
        return
    expect("a tensor that is not contiguous (an exception is right, too)", tensor, expected)
