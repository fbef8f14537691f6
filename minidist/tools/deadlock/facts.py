"""Rank facts: the part of a rank's status that deadlock detection needs, encoded in some hundred bytes.

A channel (an ordered sequence of operations, see `comm.status`) is encoded as a hash of its name, an operation as a crc
of all operations of its channel up to this one. Only the channel on which the rank waits is encoded by name. The texts
that a report needs are fetched from few ranks, once there is something to report.

    request, version u64; node, process id u32      what differs between ranks in the same state
    state u8, seq u64, hash of operation and line u64, name of the channel waited on (length u16 and text)
    per channel: hash u64, launched u64, pending u64, the crcs of the last four operations u32
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from minidist.comm.status import Channel
from minidist.tools.deadlock.status_page import STATES, ChannelProgress, Snapshot, decode_channel, encode_channel

_HEAD = struct.Struct("<QQII")
_WAIT = struct.Struct("<BQ8sH")
_CHANNEL = struct.Struct("<8sQQ4I")
_KEPT = 4


class ProcessLocation(NamedTuple):
    """Where the process of a rank runs: the index of its machine (`node`) and its process id there."""

    node: int
    pid: int


@dataclass(frozen=True)
class RankFacts:
    """The status of one rank in short, with hashes instead of texts, as ranks exchange it for deadlock detection.

    request: number of the leader's request (see `Leader`) that the rank has answered last. version, state, wait_seq,
    wait_channel: as in `Snapshot`. location: machine and process id. text_hash: equal for ranks that wait in the same
    operation, on tensors of one shape, at the same line. wait_operation, wait_location: texts, filled in only for a
    report.
    """

    request: int
    version: int
    location: ProcessLocation
    state: str
    wait_seq: int
    wait_channel: Channel | None
    text_hash: bytes
    _progress: Mapping[bytes, ChannelProgress] = field(repr=False)
    wait_operation: str = "an operation"
    wait_location: str = "an unknown line"

    @property
    def progress_by_channel(self) -> Mapping[Channel, ChannelProgress]:
        """Always empty, because the facts contain only hashes of the channels; use `progress_on`."""
        return {}

    def progress_on(self, channel: Channel) -> ChannelProgress | None:
        """Return how many operations the rank has launched on `channel` and the crcs of the last four; None if unused.

        A channel is an ordered sequence of operations, such as all collectives of a group.
        """
        return self._progress.get(_hash_channel(channel))


def encode_facts(snapshot: Snapshot, location: ProcessLocation, request: int) -> bytes:
    """Encode the part of a rank's status that deadlock detection needs as bytes, for `decode_facts`.

    snapshot: the rank's status. location: machine and process id. request: number of the leader's latest request (see
    `Leader`), which these facts answer.
    """
    channel = snapshot.wait_channel if snapshot.state in ("waiting", "pending") else None
    name = b"" if channel is None else encode_channel(channel).encode()
    text_hash = _hash_bytes(f"{snapshot.wait_operation}\n{snapshot.wait_location}".encode())
    parts = [
        _HEAD.pack(request, snapshot.version, *location),
        _WAIT.pack(STATES.index(snapshot.state), snapshot.wait_seq, text_hash, len(name)),
        name,
    ]
    for channel, progress in snapshot.progress_by_channel.items():
        crcs = [crc for crc, _ in progress.recent_operations]
        crcs += [0] * (_KEPT - len(crcs))
        parts.append(_CHANNEL.pack(_hash_channel(channel), progress.num_launched, progress.num_pending, *crcs))
    return b"".join(parts)


def decode_facts(data: bytes) -> RankFacts:
    """Return the status of a rank, as `RankFacts`, from the bytes that `encode_facts` made."""
    request, version, node, pid = _HEAD.unpack_from(data)
    return RankFacts(request, version, ProcessLocation(node, pid), *_decode_state(data[_HEAD.size :]))


@lru_cache(8192)  # most readings are the same as before, and many ranks are in the same state
def _decode_state(data: bytes) -> tuple:
    """Decode the part of a rank's facts that ranks in the same state have in common."""
    state, seq, text_hash, name_bytes = _WAIT.unpack_from(data)
    at = _WAIT.size + name_bytes
    name = data[_WAIT.size : at].decode()
    progress = {}
    for channel, launched, pending, *crcs in _CHANNEL.iter_unpack(data[at:]):
        recent = tuple((crc, "an operation") for crc in crcs[: min(launched, _KEPT)])
        progress[channel] = ChannelProgress(launched, recent, pending)
    return STATES[state], seq, decode_channel(name) if name else None, text_hash, progress


@lru_cache(8192)
def _hash_channel(channel: Channel) -> bytes:
    """Return the hash of a channel's name, by which facts refer to the channel."""
    return _hash_bytes(encode_channel(channel).encode())


def _hash_bytes(data: bytes) -> bytes:
    """Return an 8-byte hash."""
    return hashlib.blake2b(data, digest_size=8).digest()
