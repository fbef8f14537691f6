"""A decoder-only transformer that knows nothing of parallelism. Imports torch and the standard library only."""

from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.generate import generate
from minidist.models.init import init_parameters, initial_value
from minidist.models.transformer import IGNORE, Transformer

__all__ = ["IGNORE", "DropoutAddress", "ModelConfig", "Transformer", "generate", "init_parameters", "initial_value"]
