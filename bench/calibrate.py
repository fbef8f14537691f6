"""`python -m bench.calibrate --ranks 2 --ranks 4`: what this machine's network costs, and what follows from that.

Alpha, beta and gamma are fitted on every other size and held against the sizes in between, twice: every algorithm
predicted from one link that rounds of transfers show (before it ever ran), and every algorithm by a link fitted to its
own timings. Then which algorithm wins where, computed and measured, and the bucket size that follows.

Ranks of one machine share its cores and its memory. The link is measured while all of them send, so an algorithm in
which few do (a broadcast) runs faster than predicted, and faster than the bound that this link would set a cluster.
"""

import argparse
import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from rich.table import Table

from bench import calibrate_picture, command
from bench.facts import machine_facts
from minidist.comm import GroupSpec, World, bind
from minidist.comm.cost import Link, bus_bandwidth, cost_lower_bound, fastest_algorithm
from minidist.comm.overlap import best_bucket_bytes
from minidist.comm.wire_bytes import IMPLEMENTED_ALGORITHMS
from minidist.errors import RunError, UserError
from minidist.mesh import Mesh
from minidist.tools.launch import RankServer
from minidist.tools.network.calibrate import (
    BACKEND,
    TimedOperation,
    fit_link,
    fit_link_to_primitives,
    measure_collectives,
    relative_errors,
)

BACKENDS = ("gloo", "shm")
COMPARED = "all_reduce"  # the operation whose winners are shown


def timed(world: World, sizes: Sequence[int], turns: int) -> list[TimedOperation]:
    """What one rank does: measure everything on a group of all ranks."""
    return measure_collectives(
        bind(world, Mesh(dp=world.size), [GroupSpec("calibrate", ("dp",))])["calibrate"], sizes, turns
    )


@dataclass(frozen=True)
class Calibration:
    """What was measured on one number of ranks. Every other size is fitted, the ones between are held out."""

    ranks: int
    samples: list[TimedOperation]

    @cached_property
    def sizes(self) -> list[int]:
        return sorted({sample.bytes for sample in self.samples})

    @cached_property
    def fitted(self) -> list[TimedOperation]:
        return [sample for sample in self.samples if sample.bytes in self.sizes[::2]]

    @cached_property
    def held_out(self) -> list[TimedOperation]:
        return [sample for sample in self.operations if sample.bytes in self.sizes[1::2]]

    @cached_property
    def operations(self) -> list[TimedOperation]:
        """The samples that are collectives: what is predicted."""
        return [sample for sample in self.samples if sample.name not in ("round", "add")]

    @cached_property
    def link(self) -> Link:
        """From rounds of transfers and adding up alone."""
        return fit_link_to_primitives(self.fitted)

    @cached_property
    def own_links(self) -> dict[tuple[str, str], Link]:
        """Of each algorithm, from its own timings."""
        kinds = dict.fromkeys((sample.name, sample.algorithm) for sample in self.operations)
        return {kind: fit_link(s for s in self.fitted if (s.name, s.algorithm) == kind) for kind in kinds}

    def errors_of(self, kind: tuple[str, str] | None = None) -> tuple[list[float], list[float]]:
        """Relative errors at held-out sizes, predicted from the one link and from the own ones; None: of all kinds."""
        chosen = [s for s in self.held_out if kind is None or (s.name, s.algorithm) == kind]
        own = [relative_errors([sample], self.own_links[sample.name, sample.algorithm])[0] for sample in chosen]
        return relative_errors(chosen, self.link), own

    def winner(self, n: int, name: str = COMPARED) -> str:
        """Our algorithm that was measured fastest at n bytes."""
        rivals = [s for s in self.operations if s.name == name and s.bytes == n and s.algorithm != BACKEND]
        return min(rivals, key=lambda sample: sample.seconds).algorithm

    def price_of_choice(self, n: int, name: str = COMPARED) -> float:
        """Measured time of the algorithm that the model chooses, over that of the fastest."""
        seconds = {s.algorithm: s.seconds for s in self.operations if s.name == name and s.bytes == n}
        seconds.pop(BACKEND, None)
        return seconds[fastest_algorithm(name, self.ranks, n, self.link)] / min(seconds.values())


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a wrong request, 1 for a run that failed."""
    options = _parse(arguments)
    console = command.console()
    try:
        sizes = _sizes(options)
        with contextlib.nullcontext(server) if server else RankServer() as ranks_from:
            found = []
            for ranks in options.ranks or [2, 4]:
                how = {"backend": options.backend, "threads": 1, "deadline_s": 3600.0}
                found.append(Calibration(ranks, ranks_from.run(timed, ranks, (sizes, options.turns), **how).values[0]))
                _print(found[-1], console)
    except (UserError, RunError) as error:
        print(f"bench.calibrate: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    buckets = {c.ranks: _bucket(c, options) for c in found}
    for ranks, size in buckets.items():
        console.print(
            f"{ranks} ranks: {options.gradient_mib:g} MiB of gradients over {options.backward_ms:g} ms of backward are "
            f"reduced soonest in buckets of {size / 2**20:g} MiB",
            highlight=False,
        )
    command.write(options.json, as_json(found, buckets, options.backend))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    calibrate_picture.draw(found, options.picture)
    console.print(f"figures in {options.json}, picture in {options.picture}", highlight=False, soft_wrap=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.calibrate", description="alpha, beta and gamma of this machine")
    add = parser.add_argument
    add("--ranks", type=int, action="append", help="number of ranks, may be repeated (default: 2 and 4)")
    add("--backend", default="gloo", help=f"what the ranks talk through: {', '.join(BACKENDS)} (default: %(default)s)")
    add("--smallest", type=int, default=2**12, metavar="BYTES", help="first size (default: 4 KiB)")
    add("--largest", type=int, default=2**24, metavar="BYTES", help="last size (default: 16 MiB)")
    add("--turns", type=int, default=9, help="times each case is run (default: %(default)s)")
    add("--gradient-mib", type=float, default=20.0, help="gradients to cut into buckets (default: %(default)s)")
    add("--backward-ms", type=float, default=130.0, help="what backward takes (default: %(default)s)")
    command.add_outputs(parser, "calibrate", "json", "picture")
    return parser.parse_args(arguments)


def _sizes(options: argparse.Namespace) -> list[int]:
    """Powers of two from the smallest to the largest size. Raises UserError for what cannot be measured."""
    for ranks in options.ranks or []:
        if ranks < 2:
            raise UserError(f"--ranks {ranks}: a message needs 2 ranks or more")
    if options.backend not in BACKENDS:
        raise UserError(f"--backend {options.backend} is none for tensors on the CPU; possible: {', '.join(BACKENDS)}")
    if options.turns < 1:
        raise UserError(f"--turns is {options.turns}; it must be at least 1")
    sizes, n = [], options.smallest
    while 0 < n <= options.largest:
        sizes.append(n)
        n *= 2
    if len(sizes) < 4:
        raise UserError(
            f"from --smallest {options.smallest} to --largest {options.largest} there are {len(sizes)} powers of two; "
            "a fit and sizes to hold it against need 4"
        )
    return sizes


def _bucket(found: Calibration, options: argparse.Namespace) -> int:
    """The bucket size that the backend's all-reduce, as fitted, asks for."""
    link = found.own_links[COMPARED, BACKEND]

    def seconds(n: float) -> float:
        return TimedOperation(COMPARED, BACKEND, found.ranks, n, 0.0).cost.seconds(link)

    return best_bucket_bytes(int(options.gradient_mib * 2**20), options.backward_ms / 1e3, seconds)


def _print(found: Calibration, console: Console) -> None:
    link, largest = found.link, found.sizes[-1]
    console.print(
        f"\n{found.ranks} ranks: alpha {link.alpha_s * 1e6:.0f} us, 1/beta {_gb(link.beta_s)}, 1/gamma "
        f"{_gb(link.gamma_s)} (GB = 1e9 bytes)",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("operation", no_wrap=True)
    shown = f"{largest / 2**20:.3g} MiB"
    heads = (f"ms at {shown}", "bus GB/s", "of the bound", "own alpha us", "own 1/beta", "error from link", "own fit")
    for head in heads:
        table.add_column(head, justify="right")
    for (name, algorithm), own in found.own_links.items():
        sample = next(s for s in found.operations if (s.name, s.algorithm, s.bytes) == (name, algorithm, largest))
        bound_s = cost_lower_bound(name, found.ranks, largest).seconds(link)
        from_link, from_own = map(statistics.median, found.errors_of((name, algorithm)))
        table.add_row(
            f"{name} {algorithm}",
            f"{sample.seconds * 1e3:.2f}",
            f"{bus_bandwidth(name, found.ranks, largest, sample.seconds) / 1e9:.2f}",
            f"{bound_s / sample.seconds:.2f}",
            f"{own.alpha_s * 1e6:.0f}",
            _gb(own.beta_s),
            f"{from_link:.0%}",
            f"{from_own:.0%}",
        )
    console.print(table)
    from_link, from_own = map(statistics.median, found.errors_of())
    console.print(
        f"held-out sizes, median error: {from_link:.1%} predicted from the link, {from_own:.1%} by each one's own fit",
        highlight=False,
    )
    prices = [found.price_of_choice(n) for n in found.sizes]
    right = sum(price == 1 for price in prices)
    console.print(
        f"{COMPARED}: the model names the fastest algorithm at {right} of {len(prices)} sizes; the one it names takes "
        f"{statistics.median(prices):.2f} of the fastest's time (median)",
        highlight=False,
    )


def _gb(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "-"


def as_json(found: Sequence[Calibration], buckets: dict[int, int], backend: str) -> dict:
    """Everything, for whoever wants to compute on."""
    machine = machine_facts() | {"backend": backend}
    return {"machine": machine, "runs": [_run_json(one, buckets[one.ranks]) for one in found]}


def _run_json(found: Calibration, bucket: int) -> dict:
    from_link, from_own = found.errors_of()
    return {
        "ranks": found.ranks,
        "link": dataclasses.asdict(found.link),
        "own_links": {" ".join(kind): dataclasses.asdict(link) for kind, link in found.own_links.items()},
        "held_out_bytes": found.sizes[1::2],
        "median_error_from_link": statistics.median(from_link),
        "median_error_own_fit": statistics.median(from_own),
        "winners": {
            str(n): {"computed": fastest_algorithm(COMPARED, found.ranks, n, found.link), "measured": found.winner(n)}
            for n in found.sizes
        },
        "choices": list(IMPLEMENTED_ALGORITHMS[COMPARED]),
        "bucket_bytes": bucket,
        "samples": [dataclasses.asdict(sample) for sample in found.samples],
    }


if __name__ == "__main__":
    sys.exit(main())
