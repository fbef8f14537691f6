"""`python -m bench zero`: ZeRO stages 1, 2 and 3, ours on gloo and on shm, beside their peers, in turns in one run."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bench import command, zero_peers
from bench.contenders import Contender, ContenderContext, Floor, Ours
from bench.contest import FLOOR, Entry, Row, Run, compare
from bench.statistics import Interval, overhead_ratio, paired_interval
from bench.workload import SIZES
from bench.zero_peers import PEERS
from minidist.tools.launch import RankServer

STAGES, BACKENDS = (1, 2, 3), ("gloo", "shm")
# At most: our step over that of the stage's best peer on gloo; what ours on shm takes beyond the floor over what that
# peer does; our step on shm over that of FSDP2 on our shm.
STEP, OVERHEAD, FSDP2 = 0.95, 0.35, 1.00


def ours_at(stage: int, backend: str) -> str:
    return f"minidist ZeRO-{stage} {backend}"


LINEUP: dict[str, Callable[[ContenderContext], Contender]] = {
    **{
        ours_at(stage, backend): partial(Ours, stage=stage, backend=backend) for backend in BACKENDS for stage in STAGES
    },
    **{name: peer.make for name, peer in PEERS.items()},
    FLOOR: Floor,
}


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; returns the exit code: 2 for a wrong request, 1 for a contender that computes wrongly.

    server: where the ranks come from; one of its own when None.
    """
    parser = command.contest_parser("zero", "ZeRO stages 1, 2 and 3 beside others, in turns", LINEUP)
    options = parser.parse_args(arguments)

    def run(server: RankServer) -> None:
        command.check(options, LINEUP)
        contests = [partial(_contest, server, options, ranks) for ranks in options.ranks]
        command.run_contests(options, contests, verdict, backend="gloo and shm")

    return command.exit_code(run, server)


def _contest(server: RankServer, options, ranks: int) -> Run:
    work = SIZES[options.size]
    here, left_out = zero_peers.present(ranks, work.global_batch)
    absent = PEERS.keys() - set(here)
    entries = {
        name: Entry(make, beside(name)) for name, make in LINEUP.items() if name in options.only and name not in absent
    }
    return compare(server, entries, work, ranks, "full", options.rounds, options.steps, not options.no_memory, left_out)


def beside(name: str) -> str | None:
    """Which of ours a peer is set beside: that of its stage on its backend."""
    return ours_at(PEERS[name].stage, PEERS[name].backend) if name in PEERS else None


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdict(run: Run) -> Iterator[str]:
    """For each stage what was wanted of it, each in a line with its numbers, as far as it was measured."""
    for stage in STAGES:
        gloo, shm = (run.row(ours_at(stage, backend)) for backend in BACKENDS)
        rivals = {backend: _rivals(run, stage, backend) for backend in BACKENDS}
        if gloo and rivals["gloo"]:
            yield from _step(run, gloo, rivals["gloo"], STEP)
        if shm and rivals["gloo"] and run.row(FLOOR):
            yield _overhead(run, shm, rivals["gloo"])
        if shm:
            yield from _step(run, shm, rivals["shm"] or _rivals(run, 2, "shm"), FSDP2)  # FSDP2 has no stage 1
        for ours, backend in ((gloo, "gloo"), (shm, "shm")):
            if ours and ours.tensor_bytes is not None and rivals[backend]:
                yield _memory(run, ours, rivals[backend])


def _rivals(run: Run, stage: int, backend: str) -> list[Row]:
    return [row for row in run.rows if row.name in PEERS and beside(row.name) == ours_at(stage, backend)]


def _said(what: str, holds: bool, run: Run, told: str) -> str:
    return f"{what} {'holds' if holds else 'DOES NOT HOLD'}, {run.ranks} ranks: {told}"


def _step(run: Run, ours: Row, rivals: Sequence[Row], limit: float) -> Iterator[str]:
    """The best peer is the one beside which ours looks worst."""
    if rivals:
        found: dict[str, Interval] = {row.name: paired_interval(ours.step_s, row.step_s) for row in rivals}
        best = max(found, key=lambda name: found[name].median)
        told = f"{ours.name} / {best} = {found[best]} (wanted: median <= {limit:.2f})"
        yield _said("step", found[best].median <= limit, run, told)


def _overhead(run: Run, ours: Row, rivals: Sequence[Row]) -> str:
    floor = run.row(FLOOR).step_s
    found = {row.name: overhead_ratio(ours.step_s, row.step_s, floor) for row in rivals}
    best = max(found, key=lambda name: found[name].median)
    told = f"{ours.name} / {best} = {found[best]} beyond the floor (wanted: <= {OVERHEAD:.2f})"
    return _said("overhead", found[best].median <= OVERHEAD, run, told)


def _memory(run: Run, ours: Row, rivals: Sequence[Row]) -> str:
    least = min(rivals, key=lambda row: row.tensor_bytes)
    told = (
        f"{ours.name} peaks at {ours.tensor_bytes / 2**20:.1f} MiB, {least.name} at {least.tensor_bytes / 2**20:.1f}, "
        "of live tensors and shared-memory segments (wanted: no higher)"
    )
    return _said("memory", ours.tensor_bytes <= least.tensor_bytes, run, told)
