"""The interface that the trainer needs of live recovery; `tools/recovery` implements it."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from minidist.data.corpus import Corpus

if TYPE_CHECKING:
    from minidist.train.trainer import Trainer


class RegroupRequested(Exception):
    """Raised by `Trainer.run` on all ranks after a step, if the run can go on with more ranks in new process groups."""


class Recovery(ABC):
    """Interface of live recovery: what a process keeps from trainer to trainer while ranks die and are replaced.

    corpus: the training text, for every trainer of this process. connect_timeout_s: seconds after which the creation of
    a process group fails, as a rank may die meanwhile. is_after_failure: whether the run has lost or gained ranks
    before. is_regroup_requested: whether more ranks can be used now, as far as this rank knows.
    """

    corpus: Corpus
    connect_timeout_s: float
    is_after_failure: bool
    is_regroup_requested: bool

    @abstractmethod
    def restore(self, trainer: "Trainer") -> bool:
        """Collective: load the newest state in the ranks' memory into a new trainer; return whether there is one."""

    @abstractmethod
    def on_start(self, trainer: "Trainer") -> None:
        """Called on all ranks when a trainer starts to train; may use collectives."""

    @abstractmethod
    def on_step(self, trainer: "Trainer") -> None:
        """Called on all ranks when a step has been completed and reported; may use collectives."""
