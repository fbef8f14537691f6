"""`python -m bench zero`: compare minidist's ZeRO stages 1, 2 and 3, over gloo and over shm, with other libraries."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bench import command_line
from bench.bootstrap import ConfidenceInterval, overhead_ratio, paired_interval
from bench.compare_contenders import Comparison, ContenderResult, ContenderSpec, compare_contenders
from bench.contenders import (
    NO_COMMUNICATION,
    Contender,
    ContenderContext,
    Minidist,
    NoCommunication,
    SimpleMinidist,
)
from bench.workload import WORKLOADS
from bench.zero_baselines import BASELINES, available_baselines
from minidist.tools.launch import RankServer

STAGES, BACKENDS = (1, 2, 3), ("gloo", "shm")
# Upper limits: minidist's step time on gloo over the best baseline's on gloo; minidist's communication overhead on shm
# over the best baseline's on gloo; minidist's step time on shm over FSDP2's on shm.
MAX_GLOO_RATIO, MAX_OVERHEAD_RATIO, MAX_SHM_RATIO = 0.95, 0.35, 1.00


def minidist_name(stage: int, backend: str) -> str:
    """Return the name of minidist's contender of a ZeRO stage on a backend."""
    return f"minidist ZeRO-{stage} {backend}"


CONTENDERS: dict[str, Callable[[ContenderContext], Contender]] = {
    **{
        minidist_name(stage, backend): partial(Minidist, stage=stage, backend=backend)
        for backend in BACKENDS
        for stage in STAGES
    },
    **{f"minidist simple ZeRO-{stage}": partial(SimpleMinidist, stage=stage, backend="gloo") for stage in STAGES},
    **{name: baseline.make for name, baseline in BASELINES.items()},
    NO_COMMUNICATION: NoCommunication,
}


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 2 invalid options, 1 a contender that computes wrongly.

    server: launches the ranks; None starts a new rank server.
    """
    description = "Compare minidist's ZeRO stages 1, 2 and 3, over gloo and over shm, with other libraries."
    parser = command_line.comparison_parser("zero", description, CONTENDERS)
    options = parser.parse_args(arguments)

    def run(server: RankServer) -> None:
        command_line.validate(options, CONTENDERS)
        comparisons = [partial(_compare, server, options, ranks) for ranks in options.ranks]
        command_line.run_comparisons(options, comparisons, verdicts, backend="gloo and shm")

    return command_line.exit_code(run, server)


def _compare(server: RankServer, options, ranks: int) -> Comparison:
    """Compare the selected contenders on `ranks` ranks."""
    work = WORKLOADS[options.size]
    available, left_out = available_baselines(ranks, work.global_batch)
    unavailable = BASELINES.keys() - set(available)
    specs = {
        name: ContenderSpec(make, minidist_counterpart(name))
        for name, make in CONTENDERS.items()
        if name in options.only and name not in unavailable
    }
    return compare_contenders(
        server, specs, work, ranks, "full", options.rounds, options.steps, not options.no_memory, left_out
    )


def minidist_counterpart(name: str) -> str | None:
    """Return the contender of minidist's fast engine with the stage and backend of a baseline or of the simple engine.

    None if `name` is neither.
    """
    if "simple" in name:
        return minidist_name(int(name[-1]), "gloo")
    return minidist_name(BASELINES[name].stage, BASELINES[name].backend) if name in BASELINES else None


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(comparison: Comparison) -> Iterator[str]:
    """Yield one line per stage and target: the measured ratio or memory, and whether it meets the target."""
    for stage in STAGES:
        gloo, shm = (comparison.result(minidist_name(stage, backend)) for backend in BACKENDS)
        rivals = {backend: _baseline_results(comparison, stage, backend) for backend in BACKENDS}
        if gloo and rivals["gloo"]:
            yield _judge_step_time(comparison, gloo, rivals["gloo"], MAX_GLOO_RATIO)
        if shm and rivals["gloo"] and comparison.result(NO_COMMUNICATION):
            yield _judge_overhead(comparison, shm, rivals["gloo"])
        shm_rivals = rivals["shm"] or _baseline_results(comparison, 2, "shm")  # FSDP2 has no stage 1
        if shm and shm_rivals:
            yield _judge_step_time(comparison, shm, shm_rivals, MAX_SHM_RATIO)
        for ours, backend in ((gloo, "gloo"), (shm, "shm")):
            if ours and ours.tensor_bytes is not None and rivals[backend]:
                yield _judge_memory(comparison, ours, rivals[backend])


def _baseline_results(comparison: Comparison, stage: int, backend: str) -> list[ContenderResult]:
    """Return the results of the baselines of one ZeRO stage on one backend."""
    counterpart = minidist_name(stage, backend)
    baselines = [result for result in comparison.results if result.name in BASELINES]
    return [result for result in baselines if minidist_counterpart(result.name) == counterpart]


def _format_verdict(target: str, met: bool, comparison: Comparison, evidence: str) -> str:
    """Return one line: the target, whether it is met, and the measurement (`evidence`)."""
    return f"{target} target {'met' if met else 'MISSED'}, {comparison.ranks} ranks: {evidence}"


def _judge_step_time(
    comparison: Comparison, ours: ContenderResult, rivals: Sequence[ContenderResult], limit: float
) -> str:
    """Return the verdict on step time against the baseline with the highest ratio of minidist's time to its own."""
    ratios: dict[str, ConfidenceInterval] = {
        result.name: paired_interval(ours.step_s, result.step_s) for result in rivals
    }
    best = max(ratios, key=lambda name: ratios[name].median)
    evidence = f"{ours.name} / {best} = {ratios[best]} (target: median <= {limit:.2f})"
    return _format_verdict("step time", ratios[best].median <= limit, comparison, evidence)


def _judge_overhead(comparison: Comparison, ours: ContenderResult, rivals: Sequence[ContenderResult]) -> str:
    """Return the verdict on the time beyond a step without communication, against the worst such ratio."""
    lower_bound = comparison.result(NO_COMMUNICATION).step_s
    ratios = {result.name: overhead_ratio(ours.step_s, result.step_s, lower_bound) for result in rivals}
    best = max(ratios, key=lambda name: ratios[name].median)
    evidence = (
        f"{ours.name} / {best} = {ratios[best]} of the time beyond a step without communication "
        f"(target: <= {MAX_OVERHEAD_RATIO:.2f})"
    )
    return _format_verdict("overhead", ratios[best].median <= MAX_OVERHEAD_RATIO, comparison, evidence)


def _judge_memory(comparison: Comparison, ours: ContenderResult, rivals: Sequence[ContenderResult]) -> str:
    """Return the verdict on peak memory, against the baseline with the lowest peak."""
    best = min(rivals, key=lambda result: result.tensor_bytes)
    evidence = (
        f"{ours.name} peaks at {ours.tensor_bytes / 2**20:.1f} MiB, {best.name} at {best.tensor_bytes / 2**20:.1f} MiB "
        "of tensors and shared-memory segments per rank (target: no higher)"
    )
    return _format_verdict("memory", ours.tensor_bytes <= best.tensor_bytes, comparison, evidence)
