"""The peers that share model states out: each has the numbers of one process, and who is missing is named in a line."""

import importlib.util

import pytest
from test_bench import TINY

from bench import peers, rounds, zero_peers
from bench.contenders import MODES, Seat
from minidist.comm import Use, bind
from minidist.errors import RunError
from minidist.mesh import Mesh

# DeepSpeed leaves segments in /dev/shm, which no test may; its numbers are checked before it is timed, as everybody's.
CHECKED = [name for name, peer in zero_peers.PEERS.items() if peer.needs != "deepspeed"]


class OtherClip(zero_peers.FSDP2):
    """Clips by the norm of its own shards."""

    def clip(self):
        norm = super().clip()
        self.optimizer.param_groups[0]["lr"] *= 1 + self.world.rank
        return norm


class OtherNorm(zero_peers.FSDP2):
    def clip(self):
        return super().clip() / 2**0.5


def verdicts(world, names):
    """Name and mode to how far the peer is off one process, or to why it is not timed."""
    table = bind(world, Mesh(dp=world.size), [Use("bench", ("dp",))])["bench"]
    shares, wanted, found = TINY.batches(world.rank, world.size), rounds.one_process(TINY), {}
    wrong = {kind.__name__: lambda seat, kind=kind: kind(seat, reshard=True) for kind in (OtherClip, OtherNorm)}
    for name in names:
        for mode in MODES:
            make = wrong[name] if name in wrong else zero_peers.PEERS[name].make
            peer = make(Seat(TINY, mode, world))
            assert peer.kernel == "AdamW fused", name
            try:
                found[name, mode] = rounds.agree(name, peer, shares, wanted, table)
            except RunError as error:
                found[name, mode] = str(error)
    return found


@pytest.mark.parametrize("name", CHECKED)
def test_a_peer_has_the_numbers_of_one_process(ranks, name):
    needs = zero_peers.PEERS[name].needs
    if needs and not importlib.util.find_spec(needs):
        pytest.skip(f"{needs} is not installed")
    for found in ranks(verdicts, 2, [name]):
        assert set(found) == {(name, mode) for mode in MODES}
        assert all(isinstance(off, float) and off < rounds.TOLERANCE / 10 for off in found.values()), found


def test_a_peer_that_clips_wrongly_is_not_timed(ranks):
    for found in ranks(verdicts, 2, ["OtherClip", "OtherNorm"]):
        assert "it is not timed" in str(found["OtherClip", "full"])
        assert "it is not timed" in str(found["OtherNorm", "full"])


def test_every_stage_has_peers_of_torchs_own_or_more():
    assert {peer.stage for peer in zero_peers.PEERS.values()} == {1, 2, 3}
    assert {peer.stage for peer in zero_peers.PEERS.values() if peer.needs is None} == {1, 2, 3}


def test_peers_that_are_missing_are_left_out_in_one_line_each(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    names, left_out = zero_peers.present(2, 8)
    assert names == ["torch ZeRO-1", "torch FSDP2, parameters kept", "torch FSDP2"]
    assert len(left_out) == 5 and all("minidist[peers]" in line and "\n" not in line for line in left_out)


def test_a_batch_that_deepspeed_cannot_cut_leaves_it_out(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: True)
    names, left_out = zero_peers.present(3, 8)
    assert not any("DeepSpeed" in name for name in names)
    assert len(left_out) == 3 and all("must divide by 3 ranks" in line for line in left_out)
