"""`python -m bench dp`: data parallelism beside torch's DDP and others, in turns, on gloo."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from bench import command, lineup
from bench.contenders import MODES
from bench.contest import Entry, Run, compare
from bench.lineup import LINEUP, OURS
from bench.workload import SIZES
from minidist.tools.launch import RankServer


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; returns the exit code: 2 for a wrong request, 1 for a contender that computes wrongly.

    server: where the ranks come from; one of its own when None.
    """
    parser = command.contest_parser("dp", "data parallelism beside torch's, in turns", LINEUP)
    told = "full: what a trainer does; bare: no clip, no log (default: both)"
    parser.add_argument("--mode", choices=MODES, action="append", help=told)
    options = parser.parse_args(arguments)

    def run(server: RankServer) -> None:
        command.check(options, LINEUP)
        cases = itertools.product(options.ranks, options.mode or MODES)
        command.run_contests(options, [partial(_contest, server, options, *case) for case in cases], verdict)

    return command.exit_code(run, server)


def _contest(server: RankServer, options, ranks: int, mode: str) -> Run:
    work = SIZES[options.size]
    present, left_out = lineup.present(ranks, work.global_batch)
    entries = {name: Entry(LINEUP[name], OURS) for name in present if name in options.only}
    return compare(server, entries, work, ranks, mode, options.rounds, options.steps, not options.no_memory, left_out)


def verdict(run: Run) -> Iterator[str]:
    """One sentence on time and one on memory: ours against torch's DDP, and what was wanted."""
    ours, peer = run.row(OURS), run.row(lineup.REFERENCE_PEER)
    if ours is None or peer is None:
        return
    holds = peer.ours.median <= 1.00 and peer.ours.high <= 1.05
    yield (
        f"time {'holds' if holds else 'DOES NOT HOLD'}: {OURS} / {peer.name} = {peer.ours} "
        f"at {run.ranks} ranks, {run.mode} (wanted: median <= 1.00, upper end <= 1.05)"
    )
    if ours.tensor_bytes is not None:
        holds = ours.tensor_bytes <= peer.tensor_bytes
        yield (
            f"memory {'holds' if holds else 'DOES NOT HOLD'}: peak of {ours.tensor_bytes / 2**20:.1f} MiB against "
            f"{peer.tensor_bytes / 2**20:.1f} MiB of live tensors and shared-memory segments (wanted: no higher)"
        )
