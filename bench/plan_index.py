"""`python -m bench index`: the size of a checkpoint's index and the time to plan it, for many simulated ranks."""

import argparse
import hashlib
import pickle
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import command_line
from minidist.checkpoint.index import INDEX_NAME, FileEntry, format_index, format_tensors, read_index_file
from minidist.checkpoint.shards import (
    Plan,
    TensorShard,
    make_tensor_shards,
    merge_plans,
    plan_local_shards,
    shards_to_save,
)
from minidist.config import ZeroConfig
from minidist.errors import UserError
from minidist.models.config import ModelConfig
from minidist.models.transformer import Transformer
from minidist.parameters import Box, ParamSpec, flat_boxes
from minidist.tools.launch import RankServer
from minidist.zero.plan import PlannedFlatParam, plan_flat_params

KINDS = ("params", "optimizer.exp_avg", "optimizer.exp_avg_sq")
MAX_BYTES, MAX_S = 1000, 2.0  # targets: per rank and flat parameter; for all ranks


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 2 invalid options. Needs no ranks, so `server` is not used."""
    parser = argparse.ArgumentParser(
        "python -m bench index",
        description="Plan the index of a checkpoint of simulated ranks: ZeRO stage 3 and AdamW, in one process.",
    )
    parser.add_argument("--ranks", type=int, default=4096, metavar="N", help="number of ranks (default: %(default)s)")
    parser.add_argument(
        "--layers", type=int, default=16, metavar="N", help="layers of the model (default: %(default)s)"
    )
    command_line.add_output_options(parser, "index", "json")
    options = parser.parse_args(arguments)

    def run() -> None:
        for name in ("ranks", "layers"):
            if getattr(options, name) < 1:
                raise UserError(f"--{name} is {getattr(options, name)}; it must be at least 1")
        result = plan_index(options.ranks, options.layers)
        _print_result(result)
        command_line.write_json(options.json, result)

    return command_line.exit_code_of(run)


def plan_index(ranks: int, layers: int) -> dict[str, float]:
    """Plan the index as rank 0 does, from the bytes that every rank sends; returns sizes in bytes and times in seconds.

    No collective runs: each rank's plan is made in turn and pickled, as `comm.gather_object` sends it. Times are of the
    processor, so that other processes do not count: one thread does all the work.
    """
    with torch.device("meta"):
        model = Transformer(ModelConfig(hidden_size=2048, num_layers=layers, num_heads=16, num_kv_heads=16))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    flat_params = plan_flat_params(sizes, lambda name: None, ZeroConfig(stage=3), ranks, 0, 4)
    sent, num_bytes, describe_s = [], [], 0.0
    for rank in range(ranks):
        local_shards = _local_shards(flat_params, shapes, rank)
        num_bytes.append(sum(4 * shard.box.numel for shard in shards_to_save(local_shards)))
        begin = time.process_time()
        sent.append(pickle.dumps(plan_local_shards(local_shards)))
        describe_s += time.process_time() - begin
    files = [f"rank-{rank:05d}.safetensors" for rank in range(ranks)]
    checksums = [hashlib.sha256(file.encode()).hexdigest() for file in files]  # any will do
    entries = {
        file: FileEntry(checksum, size + 1000)  # with a header
        for file, checksum, size in zip(files, checksums, num_bytes, strict=True)
    }
    begin = time.process_time()
    plans: list[Plan] = [pickle.loads(one) for one in sent]
    tensors = format_tensors(merge_plans(plans, files))
    planned = time.process_time()
    text = format_index(1, {}, entries, tensors)
    formatted = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "step-00000001")).mkdir()
        (path / INDEX_NAME).write_text(text)
        begin_reading = time.process_time()
        read_index_file(path)
        read_s = time.process_time() - begin_reading
    count = ranks * len(flat_params)
    return {
        "ranks": ranks,
        "flat_parameters": len(flat_params),
        "parameters": sum(sizes.values()),
        "index_bytes": len(text),
        "index_bytes_per_rank_and_flat_parameter": len(text) / count,
        "plan_bytes_of_a_rank": max(map(len, sent)),
        "plan_bytes_per_rank_and_flat_parameter": max(map(len, sent)) / len(flat_params),
        "bytes_of_a_rank_with_cached_plan": max(len(pickle.dumps(entry)) for entry in entries.values()),
        "describe_s_per_rank": describe_s / ranks,
        "plan_s": planned - begin,
        "format_s": formatted - planned,
        "read_s": read_s,
    }


def _local_shards(
    flat_params: Sequence[PlannedFlatParam], shapes: dict[str, tuple[int, ...]], rank: int
) -> list[TensorShard]:
    """Return the shards of one rank, as the trainer makes them, without memory for their values."""
    local_shards = []
    for flat in flat_params:
        for name, (start, stop) in flat.layout.param_ranges(rank).items():
            spec = ParamSpec(name, shapes[name], tuple(flat_boxes(shapes[name], start, stop)), (rank,))
            for kind in KINDS:
                local_shards += make_tensor_shards(kind, spec, torch.empty(stop - start, device="meta"), rank)
            steps = torch.empty((), device="meta")
            local_shards.append(TensorShard(f"optimizer.step/{name}", (), Box((), ()), steps, start == 0))
    return local_shards


def _print_result(result: dict[str, float]) -> None:
    """Print sizes and times beside their targets."""
    console = command_line.make_console()
    print_line = lambda line: console.print(line, highlight=False)  # noqa: E731
    print_line(
        f"{result['ranks']} simulated ranks, {result['flat_parameters']} flat parameters, "
        f"{result['parameters']:,} parameters, AdamW"
    )
    per_index = result["index_bytes_per_rank_and_flat_parameter"]
    per_plan = result["plan_bytes_per_rank_and_flat_parameter"]
    for what, value, limit in (
        ("index, bytes per rank and flat parameter", per_index, MAX_BYTES),
        ("plan that a rank sends, bytes per flat parameter", per_plan, MAX_BYTES),
        ("rank 0 plans, seconds", result["plan_s"] + result["format_s"], MAX_S),
    ):
        print_line(f"{what}: {value:.3g}, target <= {limit:g}: {'met' if value <= limit else 'MISSED'}")
    print_line(
        f"index: {result['index_bytes']:,} bytes. With an unchanged layout a rank sends "
        f"{result['bytes_of_a_rank_with_cached_plan']} bytes, and rank 0 needs {result['format_s']:.2f} s."
    )
    print_line(
        f"Each rank describes its shards in {result['describe_s_per_rank'] * 1e3:.1f} ms and reads the index in "
        f"{result['read_s']:.2f} s."
    )
