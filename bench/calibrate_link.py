"""`python -m bench calibrate`: fit the cost model's alpha, beta and gamma to this machine, and test its predictions.

Operations are timed at many sizes. The fit uses every other size; the sizes in between are held out to test it. Two
predictions are tested: from one link, fitted to simultaneous transfers and additions alone before any algorithm runs,
and from a link per algorithm, fitted to that algorithm's own timings. Then follow the fastest algorithm per size,
predicted and measured, and the best bucket size for gradient reduction.

Ranks of one machine compete for its cores and its memory. The link is measured while all ranks send, so an algorithm in
which few ranks send (a broadcast) runs faster than predicted, and may beat the lower bound computed from this link.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from rich.table import Table

from bench import command_line, plot_calibration
from bench.environment import describe_machine
from minidist.comm import GroupSpec, World, bind
from minidist.errors import UserError
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
from minidist.tools.network.cost import MODELLED_ALGORITHMS, Link, bus_bandwidth, cost_lower_bound, fastest_algorithm
from minidist.tools.network.overlap import best_bucket_bytes

BACKENDS = ("gloo", "shm")
COMPARED = "all_reduce"  # the collective whose algorithms are compared


def measure_on_rank(world: World, sizes: Sequence[int], repetitions: int) -> list[TimedOperation]:
    """Time all operations on a group of all ranks. sizes: in bytes."""
    group = bind(world, Mesh(dp=world.size), [GroupSpec("calibrate", ("dp",))])["calibrate"]
    return measure_collectives(group, sizes, repetitions)


@dataclass(frozen=True)
class Calibration:
    """Timings on one number of ranks and the links fitted to them; every other size is fitted, the rest held out."""

    ranks: int
    samples: list[TimedOperation]

    @cached_property
    def sizes(self) -> list[int]:
        """All measured sizes in bytes, ascending."""
        return sorted({sample.num_bytes for sample in self.samples})

    @cached_property
    def fit_samples(self) -> list[TimedOperation]:
        """The samples that the links are fitted to."""
        return [sample for sample in self.samples if sample.num_bytes in self.sizes[::2]]

    @cached_property
    def held_out_samples(self) -> list[TimedOperation]:
        """The samples of collectives at held-out sizes."""
        return [sample for sample in self.collectives if sample.num_bytes in self.sizes[1::2]]

    @cached_property
    def collectives(self) -> list[TimedOperation]:
        """The samples of collectives: all but plain transfers and additions."""
        return [sample for sample in self.samples if sample.name not in ("round", "add")]

    @cached_property
    def link(self) -> Link:
        """The link fitted to simultaneous transfers and additions alone."""
        return fit_link_to_primitives(self.fit_samples)

    @cached_property
    def algorithm_links(self) -> dict[tuple[str, str], Link]:
        """One link per algorithm, fitted to its own timings, by (collective, algorithm)."""
        keys = dict.fromkeys((sample.name, sample.algorithm) for sample in self.collectives)
        return {key: fit_link(s for s in self.fit_samples if (s.name, s.algorithm) == key) for key in keys}

    def held_out_errors(self, key: tuple[str, str] | None = None) -> tuple[list[float], list[float]]:
        """Return relative errors at held-out sizes: predicted from the one link, and from the algorithms' own links.

        key: (collective, algorithm); None for all.
        """
        samples = [s for s in self.held_out_samples if key is None or (s.name, s.algorithm) == key]
        own = [relative_errors([sample], self.algorithm_links[sample.name, sample.algorithm])[0] for sample in samples]
        return relative_errors(samples, self.link), own

    def fastest_measured(self, n: int, name: str = COMPARED) -> str:
        """Return the package's algorithm that was measured fastest at n bytes."""
        candidates = [s for s in self.collectives if s.name == name and s.num_bytes == n and s.algorithm != BACKEND]
        return min(candidates, key=lambda sample: sample.seconds).algorithm

    def slowdown_of_prediction(self, n: int, name: str = COMPARED) -> float:
        """Return the measured time of the algorithm predicted to be fastest at n bytes, over that of the fastest."""
        seconds = {s.algorithm: s.seconds for s in self.collectives if s.name == name and s.num_bytes == n}
        seconds.pop(BACKEND, None)
        return seconds[fastest_algorithm(name, self.ranks, n, self.link)] / min(seconds.values())


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 2 invalid options, 1 a failed run.

    server: launches the ranks; None starts a new rank server.
    """
    options = _parse_options(arguments)
    console = command_line.make_console()

    def run(server: RankServer) -> None:
        sizes, calibrations = _validated_sizes(options), []
        launch_options = {"backend": options.backend, "threads": 1, "deadline_s": 3600.0}
        for ranks in options.ranks or [2, 4]:
            samples = server.run(measure_on_rank, ranks, (sizes, options.repetitions), **launch_options).values[0]
            calibrations.append(Calibration(ranks, samples))
            _print_calibration(calibrations[-1], console)
        _report(calibrations, options, console)

    return command_line.exit_code(run, server)


def _report(calibrations: Sequence[Calibration], options: argparse.Namespace, console: Console) -> None:
    """Print the best bucket sizes, and write all results as JSON and as a plot."""
    bucket_bytes = {calibration.ranks: _best_bucket_bytes(calibration, options) for calibration in calibrations}
    for ranks, size in bucket_bytes.items():
        console.print(
            f"{ranks} ranks: best bucket size to reduce {options.gradient_mib:g} MiB of gradients during "
            f"{options.backward_ms:g} ms of backward: {size / 2**20:g} MiB",
            highlight=False,
        )
    command_line.write_json(options.json, as_json(calibrations, bucket_bytes, options.backend))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    plot_calibration.plot(calibrations, options.picture)
    console.print(f"results in {options.json}, plot in {options.picture}", highlight=False, soft_wrap=True)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of the command."""
    description = "Fit the cost model's alpha, beta and gamma to this machine, and test its predictions."
    parser = argparse.ArgumentParser("python -m bench calibrate", description=description)
    add = parser.add_argument
    add("--ranks", type=int, action="append", metavar="N", help="number of ranks; may be repeated (default: 2 and 4)")
    add("--backend", default="gloo", help=f"backend to measure: {' or '.join(BACKENDS)} (default: %(default)s)")
    add("--smallest", type=int, default=2**12, metavar="BYTES", help="smallest tensor (default: 4 KiB)")
    add("--largest", type=int, default=2**24, metavar="BYTES", help="largest tensor (default: 16 MiB)")
    add("--repetitions", type=int, default=9, metavar="N", help="runs of every case (default: %(default)s)")
    add(
        "--gradient-mib",
        type=float,
        default=20.0,
        metavar="MIB",
        help="gradients to reduce in buckets (default: %(default)s)",
    )
    add("--backward-ms", type=float, default=130.0, metavar="MS", help="duration of backward (default: %(default)s)")
    command_line.add_output_options(parser, "calibrate", "json", "picture")
    return parser.parse_args(arguments)


def _validated_sizes(options: argparse.Namespace) -> list[int]:
    """Return the sizes to measure: doublings of the smallest up to the largest. Raises UserError for bad options."""
    for ranks in options.ranks or []:
        if ranks < 2:
            raise UserError(f"--ranks {ranks}: communication needs 2 ranks or more")
    if options.backend not in BACKENDS:
        raise UserError(f"--backend {options.backend} has no CPU tensors; possible: {', '.join(BACKENDS)}")
    if options.repetitions < 1:
        raise UserError(f"--repetitions is {options.repetitions}; it must be at least 1")
    sizes, n = [], options.smallest
    while 0 < n <= options.largest:
        sizes.append(n)
        n *= 2
    if len(sizes) < 4:
        raise UserError(
            f"--smallest {options.smallest} --largest {options.largest}: these are {len(sizes)} sizes when each is "
            "twice the one before; fitting and testing the fit needs at least 4"
        )
    return sizes


def _best_bucket_bytes(calibration: Calibration, options: argparse.Namespace) -> int:
    """Return the best bucket size for the backend's own all-reduce, by its fitted link."""
    link = calibration.algorithm_links[COMPARED, BACKEND]

    def seconds(n: float) -> float:
        return TimedOperation(COMPARED, BACKEND, calibration.ranks, n, 0.0).cost.seconds(link)

    return best_bucket_bytes(int(options.gradient_mib * 2**20), options.backward_ms / 1e3, seconds)


def _print_calibration(calibration: Calibration, console: Console) -> None:
    """Print the fitted link, a table of all algorithms, and predicted and measured winners per size."""
    link, largest = calibration.link, calibration.sizes[-1]
    console.print(
        f"\n{calibration.ranks} ranks: alpha {link.alpha_s * 1e6:.0f} us, 1/beta {_format_bandwidth(link.beta_s)}, "
        f"1/gamma {_format_bandwidth(link.gamma_s)} (GB = 1e9 bytes)",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("operation", no_wrap=True)
    size = f"{largest / 2**20:.3g} MiB"
    columns = (f"ms, {size}", "bus GB/s", "bound / time", "own alpha us", "own 1/beta", "error, one link", "error, own")
    for column in columns:
        table.add_column(column, justify="right")
    for (name, algorithm), own in calibration.algorithm_links.items():
        key = (name, algorithm, largest)
        sample = next(s for s in calibration.collectives if (s.name, s.algorithm, s.num_bytes) == key)
        bound_s = cost_lower_bound(name, calibration.ranks, largest).seconds(link)
        one_link_error, own_error = map(statistics.median, calibration.held_out_errors((name, algorithm)))
        table.add_row(
            f"{name} {algorithm}",
            f"{sample.seconds * 1e3:.2f}",
            f"{bus_bandwidth(name, calibration.ranks, largest, sample.seconds) / 1e9:.2f}",
            f"{bound_s / sample.seconds:.2f}",
            f"{own.alpha_s * 1e6:.0f}",
            _format_bandwidth(own.beta_s),
            f"{one_link_error:.0%}",
            f"{own_error:.0%}",
        )
    console.print(table)
    one_link_error, own_error = map(statistics.median, calibration.held_out_errors())
    console.print(
        f"median error at held-out sizes: {one_link_error:.1%} predicted from one link, {own_error:.1%} from each "
        "algorithm's own link",
        highlight=False,
    )
    slowdowns = [calibration.slowdown_of_prediction(n) for n in calibration.sizes]
    correct = sum(slowdown == 1 for slowdown in slowdowns)
    console.print(
        f"{COMPARED}: the model predicts the fastest algorithm at {correct} of {len(slowdowns)} sizes; the predicted "
        f"algorithm takes {statistics.median(slowdowns):.2f} times the fastest one's time (median)",
        highlight=False,
    )


def _format_bandwidth(seconds_per_byte: float) -> str:
    """Return a time per byte as bandwidth, "1.23 GB/s"; "-" for 0."""
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "-"


def as_json(calibrations: Sequence[Calibration], bucket_bytes: dict[int, int], backend: str) -> dict:
    """Return all timings, links and predictions as a JSON-compatible dict. bucket_bytes: by number of ranks."""
    runs = [_calibration_as_json(calibration, bucket_bytes[calibration.ranks]) for calibration in calibrations]
    return {"machine": describe_machine(backend), "runs": runs}


def _calibration_as_json(calibration: Calibration, bucket_bytes: int) -> dict:
    """Return links, errors and fastest algorithms of one calibration as a JSON-compatible dict."""
    one_link_errors, own_errors = calibration.held_out_errors()
    return {
        "ranks": calibration.ranks,
        "link": dataclasses.asdict(calibration.link),
        "algorithm_links": {
            " ".join(key): dataclasses.asdict(link) for key, link in calibration.algorithm_links.items()
        },
        "held_out_bytes": calibration.sizes[1::2],
        "median_error_one_link": statistics.median(one_link_errors),
        "median_error_own_link": statistics.median(own_errors),
        "fastest": {
            str(n): {
                "predicted": fastest_algorithm(COMPARED, calibration.ranks, n, calibration.link),
                "measured": calibration.fastest_measured(n),
            }
            for n in calibration.sizes
        },
        "algorithms": list(MODELLED_ALGORITHMS[COMPARED]),
        "bucket_bytes": bucket_bytes,
        "samples": [dataclasses.asdict(sample) for sample in calibration.samples],
    }
