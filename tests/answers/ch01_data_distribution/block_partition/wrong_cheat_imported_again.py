"""divides_evenly: The module is imported a second time, without the guard."""

import importlib
import sys

sys.modules.pop("minidist.data.partition")
block = importlib.import_module("minidist.data.partition").block
