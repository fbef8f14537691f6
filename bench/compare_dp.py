"""`python -m bench dp`: compare minidist's data parallelism with torch DDP, DeepSpeed and FairScale over gloo."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bench import baselines, command_line
from bench.compare_contenders import Comparison, ContenderSpec, compare_contenders
from bench.contenders import (
    MODES,
    NO_COMMUNICATION,
    Contender,
    ContenderContext,
    Minidist,
    NoCommunication,
    SimpleMinidist,
    TorchDDP,
)
from bench.workload import WORKLOADS
from minidist.tools.launch import RankServer

MINIDIST, TORCH_DDP = "minidist", "torch DDP"
CONTENDERS: dict[str, Callable[[ContenderContext], Contender]] = {
    MINIDIST: Minidist,
    "minidist naive": partial(Minidist, gradients="naive"),
    "minidist simple": SimpleMinidist,
    "minidist simple naive": partial(SimpleMinidist, gradients="naive"),
    TORCH_DDP: TorchDDP,
    "torch DDP bucket view": partial(TorchDDP, gradient_as_bucket_view=True),
    "DeepSpeed ZeRO-0": baselines.DeepSpeed,
    "FairScale ShardedDDP": baselines.FairScaleShardedDDP,
    NO_COMMUNICATION: NoCommunication,
}
_PACKAGES = {"DeepSpeed ZeRO-0": "deepspeed", "FairScale ShardedDDP": "fairscale"}
# Upper limits of minidist's step time over torch DDP's.
MAX_MEDIAN_RATIO, MAX_RATIO_UPPER_END = 1.00, 1.05


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 2 invalid options, 1 a contender that computes wrongly.

    server: launches the ranks; None starts a new rank server.
    """
    description = "Compare minidist's data parallelism with torch DDP, DeepSpeed and FairScale over gloo."
    parser = command_line.comparison_parser("dp", description, CONTENDERS)
    mode_help = (
        "full: a trainer's step with global token count, gradient clipping and loss; bare: forward, backward, gradient "
        "reduction and optimizer step only; may be repeated (default: both)"
    )
    parser.add_argument("--mode", choices=MODES, action="append", help=mode_help)
    options = parser.parse_args(arguments)

    def run(server: RankServer) -> None:
        command_line.validate(options, CONTENDERS)
        cases = itertools.product(options.ranks, options.mode or MODES)
        comparisons = [partial(_compare, server, options, *case) for case in cases]
        command_line.run_comparisons(options, comparisons, verdicts)

    return command_line.exit_code(run, server)


def available_contenders(ranks: int, global_batch: int) -> tuple[list[str], list[str]]:
    """Return the names of the contenders that can run here, and one line for each that cannot."""
    return baselines.find_available({name: _PACKAGES.get(name) for name in CONTENDERS}, ranks, global_batch)


def _compare(server: RankServer, options, ranks: int, mode: str) -> Comparison:
    """Compare the selected contenders on `ranks` ranks in one mode, "full" or "bare"."""
    work = WORKLOADS[options.size]
    names, left_out = available_contenders(ranks, work.global_batch)
    if mode == "bare":  # the simple engine has no such step
        names = [name for name in names if "simple" not in name]
    specs = {name: ContenderSpec(CONTENDERS[name], MINIDIST) for name in names if name in options.only}
    return compare_contenders(
        server, specs, work, ranks, mode, options.rounds, options.steps, not options.no_memory, left_out
    )


def verdicts(comparison: Comparison) -> Iterator[str]:
    """Yield one line on step time and one on memory: minidist against torch DDP, and whether it meets the target."""
    ours, ddp = comparison.result(MINIDIST), comparison.result(TORCH_DDP)
    if ours is None or ddp is None:
        return
    met = ddp.minidist_ratio.median <= MAX_MEDIAN_RATIO and ddp.minidist_ratio.high <= MAX_RATIO_UPPER_END
    yield (
        f"step time target {'met' if met else 'MISSED'}: {MINIDIST} / {ddp.name} = {ddp.minidist_ratio} on "
        f"{comparison.ranks} ranks, mode {comparison.mode} (target: median <= {MAX_MEDIAN_RATIO:.2f}, upper end <= "
        f"{MAX_RATIO_UPPER_END:.2f})"
    )
    if ours.tensor_bytes is not None:
        met = ours.tensor_bytes <= ddp.tensor_bytes
        yield (
            f"memory target {'met' if met else 'MISSED'}: {MINIDIST} peaks at {ours.tensor_bytes / 2**20:.1f} MiB of "
            f"tensors and shared-memory segments per rank, {ddp.name} at {ddp.tensor_bytes / 2**20:.1f} MiB "
            "(target: no higher)"
        )
