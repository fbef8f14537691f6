"""Suggestions for unknown options, on the command line and in TOML files: what other trainers call ours, and typos."""

import difflib
from collections.abc import Collection

# Our options, each with the names that PyTorch's tools, Megatron-LM, DeepSpeed, Hugging Face, Lightning, torchtitan and
# nanoGPT have for it, and with sections that stand for their main option. Some name a value as well.
_NAMES_ELSEWHERE = {
    "ranks": "world-size nproc nproc-per-node num-processes num-gpus gpus devices n np",
    "folder": "output output-dir out-dir run-dir log-dir save save-dir logdir",
    "config": "config-file",
    "device cpu": "cpu use-cpu no-cuda",
    "device cuda": "cuda gpu",
    "recompute block": "activation-checkpointing gradient-checkpointing checkpoint-activations recompute-activations "
    "recompute-granularity ac",
    "compile": "torch-compile",
    "train.steps": "max-steps num-steps train-steps train-iters max-iters iters iterations epochs num-epochs "
    "max-epochs num-train-epochs",
    "train.global-batch": "batch batch-size bs global-batch-size train-batch-size per-device-train-batch-size "
    "local-batch-size",
    "train.micro-batches": "grad-accum grad-accum-steps gradient-accumulation gradient-accumulation-steps "
    "accumulation-steps accumulate-grad-batches update-freq microbatches num-microbatches micro-batch-size "
    "microbatch-size train-micro-batch-size-per-gpu",
    "train.log-every": "log-interval log-freq logging-steps",
    "train.eval-every": "eval-interval eval-steps val-interval",
    "optim.lr": "learning-rate max-lr peak-lr base-lr",
    "optim.kind": "optim optimizer optimizer-type",
    "optim.schedule": "scheduler lr-scheduler lr-scheduler-type lr-schedule lr-decay-style",
    "optim.warmup-steps": "warmup warmup-iters warmup-ratio lr-warmup-steps lr-warmup-iters num-warmup-steps",
    "optim.clip-norm": "clip clip-grad grad-clip max-norm max-grad-norm gradient-clipping gradient-clip-val",
    "optim.weight-decay": "wd",
    "optim.min-lr-fraction": "min-lr",
    "optim.betas": "beta1 beta2 adam-beta1 adam-beta2",
    "optim.eps": "epsilon adam-eps adam-epsilon",
    "precision.policy": "precision dtype mixed-precision amp",
    "precision.policy bf16": "bf16 bfloat16",
    "precision.policy fp16": "fp16 float16 half",
    "precision.policy fp32": "fp32 float32",
    "precision.policy fp64": "fp64 float64 double",
    "precision.initial-scale": "initial-loss-scale init-scale",
    "zero.stage": "zero zero-stage zero-optimization",
    "zero.stage 1": "use-distributed-optimizer distributed-optimizer zero1",
    "zero.stage 2": "zero2",
    "zero.stage 3": "fsdp fsdp2 fully-shard zero3",
    "zero.offload": "cpu-offload offload-optimizer optimizer-cpu-offload",
    "data.path": "data dataset data-dir data-file train-data train-file",
    "data.seq-len": "seq-length sequence-length block-size context-length max-length",
    "mesh.tp": "tensor-parallel tensor-parallel-size tensor-parallel-degree tensor-model-parallel-size tp-size",
    "mesh.pp": "pipeline-parallel pipeline-parallel-size pipeline-parallel-degree pipeline-model-parallel-size pp-size",
    "mesh.cp": "context-parallel context-parallel-size context-parallel-degree cp-size",
    "mesh.dp": "data-parallel data-parallel-size data-parallel-degree data-parallel-replicate-degree dp-size",
    "parallel.sequence": "sequence-parallel",
    "parallel.schedule": "pipeline-schedule pipeline-parallel-schedule",
    "parallel.chunks": "num-virtual-stages-per-pipeline-rank virtual-pipeline-model-parallel-size",
    "model.num-layers": "layers n-layer n-layers num-hidden-layers depth",
    "model.hidden-size": "n-embd d-model dim hidden-dim embed-dim width",
    "model.num-heads": "heads n-head n-heads num-attention-heads",
    "model.num-kv-heads": "n-kv-heads num-key-value-heads num-query-groups",
    "model.intermediate-size": "ffn-hidden-size ffn-dim d-ff mlp-dim",
    "model.max-seq-len": "max-position-embeddings",
    "model.dropout": "hidden-dropout attention-dropout",
    "comm.backend": "distributed-backend dist-backend",
    "comm.bucket-mib": "bucket-size bucket-cap-mb ddp-bucket-size",
    "comm.timeout-s": "timeout ddp-timeout distributed-timeout-minutes",
    "checkpoint.every": "save-every save-steps save-interval checkpoint-interval ckpt-every",
    "checkpoint.keep": "save-total-limit keep-latest-k keep-last",
    "checkpoint.resume": "checkpoint load load-checkpoint resume-from resume-from-checkpoint ckpt-path",
    "consistency.mode": "consistency",
    "trace.file": "profile profiler",
}
_OPTION_OF = {name: option for option, names in _NAMES_ELSEWHERE.items() for name in names.split()}
_CUTOFF = 0.7  # of similarity, for difflib


def suggest_options(given: str, names: Collection[str], max_suggestions: int = 3) -> list[str]:
    """Return the options that a user may have meant by the unknown name `given`, the likeliest first.

    given: without leading dashes; underscores count as dashes. names: of all options, with dashes inside; a bool option
    has a second one, such as "zero.no-prefetch". A suggestion is one of them, some with a value: "zero.stage 3". None
    for a section that no single option stands for.
    """
    given = given.lower().replace("_", "-")
    section, _, last = given.rpartition(".")
    found = [given] if given in names else []
    if given.startswith("no-") and section and (negated := f"{section.removeprefix('no-')}.no-{last}") in names:
        return [negated]
    elsewhere = _resolve(_OPTION_OF.get(given) or _OPTION_OF.get(last), names)
    if elsewhere:
        found.append(elsewhere)
    same = [name for name in names if name.rpartition(".")[2] == last]
    found += sorted(same, key=lambda name: not name.startswith(("train.", "model.", "mesh.")))
    if not found and any(name.startswith(f"{given}.") for name in names):
        return []
    if not found:
        found += difflib.get_close_matches(given, names, 1, _CUTOFF)
    if not found:
        lasts = {name.rpartition(".")[2]: name for name in reversed(list(names))}
        lasts = {name: resolved for name, option in _OPTION_OF.items() if (resolved := _resolve(option, names))} | lasts
        found += [lasts[one] for one in difflib.get_close_matches(last, lasts, 1, _CUTOFF)]
    return list(dict.fromkeys(found))[:max_suggestions]


def _resolve(option: str | None, names: Collection[str]) -> str | None:
    """Return the option, with its value if there is one, as this command names it; None if the command has no such.

    The command may have it without its section: `minidist simulate` has "micro-batches".
    """
    name, space, value = (option or "").partition(" ")
    own = next((one for one in (name, name.rpartition(".")[2]) if one in names), None)
    return own and own + space + value
