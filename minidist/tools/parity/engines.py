"""The engines that parity cases train with, behind one interface: that of the fast trainer, and the simple one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from minidist.checkpoint.load import load_checkpoint, read_index
from minidist.checkpoint.save import save_checkpoint
from minidist.comm import Groups, GroupSpec, bind_all_gather_object
from minidist.config import Config
from minidist.data.loader import Batch
from minidist.mesh import Mesh
from minidist.parallelize import group_specs, parallelize
from minidist.parameters import ParamSpec, named_parameters
from minidist.simple import checkpoint as simple_checkpoint
from minidist.simple import engine as simple_engine
from minidist.simple import parallelize as simple_parallelize
from minidist.simple import training_state
from minidist.train.checkpoint_state import checkpoint_shards, create_optimizer_states
from minidist.train.engine import Engine


class ParityEngine:
    """The fast trainer's engine, as a parity case trains it. model: the unsplit model, which is split in place.

    Attributes: specs, the `ParamSpec` of each parameter on this rank by name, and master_specs, those of the elements
    of each master that this rank updates.
    """

    def __init__(self, model: nn.Module, groups: Groups, config: Config):
        self.groups = groups
        self.engine = Engine(parallelize(model, groups, config), groups, config.optim, config.train.seed)
        self.model, self.specs = self.engine.model, self.engine.specs
        self.master_specs: Mapping[str, ParamSpec] = self.engine.reducer.master_specs
        self.parameters = named_parameters(self.model)

    @staticmethod
    def group_specs(mesh: Mesh, config: Config) -> list[GroupSpec]:
        """Return the process groups that the engine needs."""
        return group_specs(mesh, config)

    def step(
        self,
        step: int,
        batches: Sequence[Batch],
        lr: float,
        on_gradients_reduced: Callable[[], None] | None = None,
        global_tokens: float = 0.0,
    ) -> Any:
        """Collective: train on a global batch; return its result. Arguments as those of the fast `Engine.step`."""
        return self.engine.step(
            step, batches, lr, on_gradients_reduced=on_gradients_reduced, global_tokens=global_tokens
        )

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the reduced gradients of the masters, by name; None where no rank used the parameter."""
        return self.engine.reducer.gradients()

    def masters(self) -> dict[str, Tensor]:
        """Return this rank's elements of each parameter, by name, as `master_specs` describes them."""
        return self.engine.reducer.checkpoint_tensors()

    def gather_parameters(self) -> None:
        """Collective: give all parameters of the model their values, if they are sharded."""
        if self.engine.reducer.gatherer is not None:
            self.engine.reducer.gatherer.gather_all()

    def save(self, root: str, step: int) -> Path:
        """Collective: save a checkpoint of this engine's state in `root`; return its folder."""
        control = self.groups["control"]
        shards = checkpoint_shards(self.engine)
        return save_checkpoint(root, step, shards, {}, bind_all_gather_object(control), control.rank)

    def load(self, path: Path) -> None:
        """Collective: load the state that `save` has saved."""
        control = self.groups["control"]
        create_optimizer_states(self.engine, read_index(path).tensors)
        shards = checkpoint_shards(self.engine)
        load_checkpoint(path, shards, bind_all_gather_object(control), control.rank)
        self.engine.reducer.after_load()


class _SimpleEngine(simple_engine.Engine):
    """The simple engine, which calls `on_gradients_reduced` when the gradients are reduced, before they are clipped."""

    on_gradients_reduced: Callable[[], None] = staticmethod(lambda: None)

    def squared_norm(self) -> float:
        """Call `on_gradients_reduced`, then return the squared norm of this rank's reduced gradients."""
        self.on_gradients_reduced()
        return super().squared_norm()


class SimpleParityEngine(ParityEngine):
    """The simple trainer's engine, trained by a parity case."""

    def __init__(self, model: nn.Module, groups: Groups, config: Config):
        self.groups = groups
        self.engine = _SimpleEngine(simple_parallelize.parallelize(model, groups, config), groups, config)
        self.model, self.specs = self.engine.model, self.engine.parallel.specs
        self.master_specs = self.engine.parallel.master_specs
        self.parameters = named_parameters(self.model)

    @staticmethod
    def group_specs(mesh: Mesh, config: Config) -> list[GroupSpec]:
        """Return the process groups that the engine needs."""
        return simple_parallelize.group_specs(mesh, config)

    def step(self, step, batches, lr, on_gradients_reduced=lambda: None, global_tokens=0.0):
        """Collective: train on a global batch; return its result."""
        self.engine.on_gradients_reduced = on_gradients_reduced
        return self.engine.step(step, batches, lr)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the reduced gradients of the masters, by name; None where no rank used the parameter."""
        return {name: master.grad for name, master in self.masters().items()}

    def masters(self) -> dict[str, Tensor]:
        """Return this rank's elements of each parameter, by name."""
        return self.engine.reducer.masters

    def gather_parameters(self) -> None:
        """Collective: give all parameters of the model their values, if they are sharded."""
        for flat in getattr(self.engine.reducer, "flat_params", []):
            flat.start_gather()
            flat.wait()

    def save(self, root: str, step: int) -> Path:
        """Collective: save a checkpoint of this engine's state in `root`; return its folder."""
        shards = training_state.state_shards(self.engine)
        return simple_checkpoint.save(Path(root), step, shards, {}, self.groups["control"])

    def load(self, path: Path) -> None:
        """Collective: load the state that `save` has saved."""
        training_state.create_optimizer_states(self.engine, simple_checkpoint.read_index(path)["tensors"])
        simple_checkpoint.load(path, training_state.state_shards(self.engine), self.groups["control"])
        self.engine.reducer.update_parameters()


def engine_class(engine: str) -> type[ParityEngine]:
    """Return the class that trains the cases of an engine. engine: "fast" or "simple"."""
    return SimpleParityEngine if engine == "simple" else ParityEngine
