"""Count the files of minidist that building an engine with ZeRO stage 1 enters, and those that one step enters.

python -m tests.helpers.hops    # two ranks; prints, for rank 0, the files by phase

Fewer files mean fewer hops for a reader who follows one parameter from its gradient to its update.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import minidist
from minidist.comm import Meter, World, bind
from minidist.config import Config, MeshConfig, OptimConfig, TrainConfig, ZeroConfig
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.tools.launch import RankServer
from minidist.train.engine import Engine

PACKAGE = Path(minidist.__file__).parent
MODEL = ModelConfig(vocab_size=128, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1)


@contextmanager
def files_entered(files: set[str]) -> Iterator[None]:
    """Add to `found` every file of the package in which a function is called within this context."""

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def trace_files(world: World) -> dict[str, list[str]]:
    """The files entered while the engine is built and in its second step, by phase."""
    config = Config(
        model=MODEL,
        mesh=MeshConfig(dp=world.size),
        zero=ZeroConfig(stage=1),
        optim=OptimConfig(clip_norm=1.0),
        train=TrainConfig(global_batch=4),
    )
    mesh = config.mesh_of(world.size)
    groups = bind(world, mesh, group_specs(mesh, config), meter=Meter())
    model = Transformer(config.model)
    init_parameters(model, 0)
    built: set[str] = set()
    with files_entered(built):
        engine = Engine(parallelize(model, groups, config), groups, config.optim, 0)
    loader = Loader(generate_text(2000), 8, 0)
    phases: dict[str, set[str]] = {"building": built, "step": set()}

    def run(number: int) -> None:
        engine.step(number, loader.micro_batches(4 * number, 4, world.rank, world.size, 1), 0.1)

    run(0)
    with files_entered(phases["step"]):
        run(1)
    return {phase: sorted(files) for phase, files in phases.items()}


def followed_files(files: list[str]) -> list[str]:
    """The core's files that a reader opens to follow one parameter, with `comm` counted as one file.

    Models and data, which are the same in every layout, and tools are left out.
    """
    core = [file for file in files if not file.startswith(("models/", "data/", "tools/"))]
    return sorted({"comm" if file.startswith("comm/") else file for file in core})


def main() -> None:
    """Print the files of each phase."""
    from tests.helpers.hops import trace_files as in_module  # ranks cannot import `__main__`

    with RankServer() as server:
        found = server.run(in_module, 2, (), deadline_s=60).values[0]
    for phase, files in found.items():
        print(f"{phase}: {len(files)} files; {len(followed_files(files))} to follow one parameter:")
        print("    " + "\n    ".join(followed_files(files)))


if __name__ == "__main__":
    main()
