"""`python -m bench watch`: what deadlock detection under torchrun costs per rank and second of waiting.

One process simulates the ranks: it runs the watchdog's code of every rank in simulated time, against a real TCPStore
in a process of its own. All ranks but one wait; the last one is slow, then returns without launching its part. CPU time
is measured on both sides; the time until the report is simulated time, without the time of the operations.
"""

import argparse
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple, TextIO

import torch.distributed as dist
from rich.table import Table

from bench import command_line
from bench.environment import describe_machine
from minidist.comm import World
from minidist.comm.status import Channel
from minidist.errors import RunError, UserError
from minidist.tools.deadlock.status_page import StatusPage
from minidist.tools.deadlock.watchdog import TICK_S, WatchParticipant
from minidist.tools.launch import RankServer

TARGET_MS = 1.0  # per rank and second of waiting
_NODE_RANKS = 8
_MAX_REPORT_S = 60.0
_MAX_START_S = 60.0


class WatchCost(NamedTuple):
    """The cost of watching `ranks` ranks; the first four in milliseconds of CPU time per second of waiting.

    client: of a rank's thread, mean over the ranks; leader: of the rank that spends most; server: of the store, divided
    by the number of ranks. wall: mean duration of a rank's calls, with the time that it waits for the store.
    period_s: between two readings of a rank. report_s: from the end of the slow rank to the report.
    """

    ranks: int
    client: float
    leader: float
    server: float
    wall: float
    period_s: float
    report_s: float


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 2 invalid options, 1 failed. server: starts the store."""
    parser = argparse.ArgumentParser("python -m bench watch", description="Measure the cost of deadlock detection.")
    default = [64, 512, 4096]
    ranks_help = f"number of simulated ranks; may be repeated (default: {', '.join(map(str, default))})"
    parser.add_argument("--ranks", type=int, action="append", metavar="N", help=ranks_help)
    seconds_help = "simulated seconds of waiting (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help=seconds_help)
    command_line.add_output_options(parser, "watch", "json")
    options = parser.parse_args(arguments)

    def run(server: RankServer) -> None:
        for name, value, least in (("ranks", min(options.ranks or default), 2), ("seconds", options.seconds, 1)):
            if value < least:
                raise UserError(f"--{name} is {value}; it must be at least {least}")
        costs = [measure_cost(server, ranks, options.seconds) for ranks in options.ranks or default]
        _report(costs, options.seconds)
        records = [cost._asdict() for cost in costs]
        header = {"machine": describe_machine("gloo"), "seconds": options.seconds}
        command_line.write_json(options.json, header | {"costs": records})

    return command_line.exit_code(run, server)


def measure_cost(server: RankServer, ranks: int, seconds: float) -> WatchCost:
    """Simulate `seconds` of waiting, then the deadlock. Raises RunError if it is not reported within a minute."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_MAX_START_S)
        job = server.start(_serve_store, 1, (listener.getsockname()[1],))
        connection = listener.accept()[0]
    try:
        stream = connection.makefile("rw")
        store = dist.TCPStore("127.0.0.1", int(stream.readline()), is_master=False, wait_for_workers=False)
        pages = [_make_page(rank, ranks) for rank in range(ranks)]
        watched = [
            WatchParticipant(rank, ranks, page, store, rank // _NODE_RANKS, 1e9, 1e9) for rank, page in enumerate(pages)
        ]
        everyone = Channel("collective", "control", tuple(range(ranks)))
        for page in pages[:-1]:
            page.on_wait(
                everyone, page.on_launch(everyone, "all_reduce", (4,), "float64"), "all_reduce", (4,), "float64"
            )
        cpu_s, wall_s = [0.0] * ranks, 0.0
        server_s = _request_server_cpu_s(stream)
        for tick in range(round(seconds / TICK_S)):
            wall_s += _tick_all(watched, tick * TICK_S, cpu_s)[1]
        server_s = _request_server_cpu_s(stream) - server_s
        pages[-1].record_end("returned")
        watched[-1].post()
        report, waited_s = None, 0.0
        while report is None:
            if waited_s > _MAX_REPORT_S:
                raise RunError(f"{ranks} simulated ranks: no report within {_MAX_REPORT_S:g} s")
            report, _ = _tick_all(watched[:-1], seconds + waited_s, [0.0] * ranks)
            waited_s += TICK_S
    finally:
        job.kill()
        connection.close()
    per_s = 1e3 / seconds
    period_s = watched[0].period_s
    mean = sum(cpu_s) / ranks * per_s
    return WatchCost(
        ranks, mean, max(cpu_s) * per_s, server_s / ranks * per_s, wall_s / ranks * per_s, period_s, waited_s
    )


def _make_page(rank: int, ranks: int) -> StatusPage:
    """Return the page of a rank that has communicated in the groups of a run with tp, pp and dp."""
    page, first = StatusPage(), rank // _NODE_RANKS * _NODE_RANKS
    node = tuple(range(first, min(first + _NODE_RANKS, ranks)))
    replicas = tuple(range(rank % _NODE_RANKS, ranks, _NODE_RANKS))
    channels = [Channel("collective", name, node) for name in ("tp", "loss", "embedding")]
    channels += [Channel("collective", name, replicas) for name in ("grads", "params", "norm")]
    channels += [
        Channel(kind, "pp", replicas, peer, tag) for kind in ("send", "recv") for peer in replicas[:2] for tag in (0, 1)
    ]
    for channel in channels:
        for _ in range(5):
            page.on_launch(channel, "all_reduce", (1000,), "float32")
    return page


def _tick_all(watched: Sequence[WatchParticipant], now_s: float, cpu_s: list[float]) -> tuple[str | None, float]:
    """Let every rank do what is due; add the CPU time of each to `cpu_s`. Return the report and the wall time."""
    report, start_s = None, time.perf_counter()
    for participant in watched:
        before_s = time.thread_time()
        report = participant.tick(now_s) or report
        cpu_s[participant.rank] += time.thread_time() - before_s
        participant.notes.clear()
    return report, time.perf_counter() - start_s


def _serve_store(world: World, port: int) -> None:
    """Serve a store, whose port goes to the socket at `port`; answer every line with this process's CPU time."""
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as stream:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        print(store.port, file=stream, flush=True)
        for _ in stream:
            print(time.process_time(), file=stream, flush=True)


def _request_server_cpu_s(stream: TextIO) -> float:
    """Ask the store's process for its CPU time in seconds."""
    print("time", file=stream, flush=True)
    return float(stream.readline())


def _report(costs: Sequence[WatchCost], seconds: float) -> None:
    """Print the table, and whether the largest number of ranks meets the target."""
    console = command_line.make_console()
    title = f"CPU time in ms per second of waiting; {seconds:g} simulated seconds, one TCPStore"
    table = Table(
        "ranks",
        "rank, mean",
        "leader",
        "store / ranks",
        "rank, wall",
        "reads every (s)",
        "report after (s)",
        title=title,
    )
    for cost in costs:
        numbers = [f"{value:.3f}" for value in cost[1:5]]
        table.add_row(str(cost.ranks), *numbers, f"{cost.period_s:.2f}", f"{cost.report_s:.1f}")
    console.print(table)
    last = costs[-1]
    for what, value in (("a rank's thread", last.client), ("the store, divided by the ranks,", last.server)):
        verdict = "met" if value <= TARGET_MS else "MISSED"
        console.print(
            f"{last.ranks} ranks: {what} {value:.3f} ms, target <= {TARGET_MS:g} ms: {verdict}", highlight=False
        )
