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

    def gather_transfers(self) -> list[list]:
        """All-gather the transfers of every rank. Call it after the block."""
        return all_gather_object(self.transfers, self._network.group)

    def expect_ring(self, world) -> None:
        """Fail unless every rank sent to one neighbour and received from the other, size - 1 times, all at once."""
        to, source = sorted(set(self.peers("send"))), sorted(set(self.peers("recv")))
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        if (to, source) not in (([right], [left]), ([left], [right])):
            either = f"{[right]} and {[left]}, or {[left]} and {[right]}"
            raise Wrong("wrong", "ranks sent to and ranks received from", either, f"{to} and {source}")
        expect("messages sent", len(self.peers("send")), world.size - 1)
        sends, receives = ([one for one in self._records if one.name == name] for name in ("send", "recv"))
        pairs = zip(sends, receives, strict=False)
        starts_before_receiving = all(other.waited is None or one.launched < other.waited for one, other in pairs)
        at_once = sum(all_gather_object(starts_before_receiving, self._network.group))
        if at_once < world.size // 2:  # every other rank may receive first
            what = "ranks that start to send before they have received; the others wait for them"
            raise Wrong("wrong", what, f"at least {world.size // 2} of {world.size}", str(at_once))
