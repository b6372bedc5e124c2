"""KV-cache compression for long-context language models, in JAX.

  lm = kvjax.load("smollm2-135m-instruct")
  chat = lm.compress(open("docs/notes.txt").read(), "keydiff", 0.75)
  print(chat.ask("What is the code of the cellar door?", 14))

`load` reads a model, and `get_plan` makes a plan from the name of a method and
a budget. `prefill` compresses prompts by one plan, `sweep` by many at once;
`generate` and `stream` answer from the compressed caches. `kvjax.methods`,
`kvjax.allocation` and `kvjax.retrieval` hold the classes, `kvjax.models` what
`load` returns, and `kvjax.testing` checks for your own.
"""

import importlib
import importlib.metadata
import types
import typing

from kvjax import allocation as allocation
from kvjax import methods as methods
from kvjax import retrieval as retrieval
from kvjax.activations import Activations as Activations
from kvjax.cache.cache import Cache as Cache
from kvjax.cache.joining import group_caches as group_caches
from kvjax.cache.joining import stack as stack
from kvjax.cache.joining import unstack as unstack
from kvjax.cache.layers import LayerCache as LayerCache
from kvjax.calibration.calibrating import calibrate as calibrate
from kvjax.calibration.features import Features as Features
from kvjax.calibration.measured import Triples as Triples
from kvjax.calibration.measured import likelihood_ratio as likelihood_ratio
from kvjax.calibration.measured import nll_ratio as nll_ratio
from kvjax.calibration.record import Calibrated as Calibrated
from kvjax.calibration.record import Calibration as Calibration
from kvjax.checkpoint.loading import load_cache as load_cache
from kvjax.checkpoint.saving import save_cache as save_cache
from kvjax.engine.capacity import decoding_nbytes as decoding_nbytes
from kvjax.engine.compression_plan import Plan as Plan
from kvjax.engine.decode import Decoding as Decoding
from kvjax.engine.generate import Generated as Generated
from kvjax.engine.generate import generate as generate
from kvjax.engine.generate import reserve as reserve
from kvjax.engine.likelihood import answer_nll as answer_nll
from kvjax.engine.likelihood import (
  negative_log_likelihood as negative_log_likelihood,
)
from kvjax.engine.prefill import measured_sweep as measured_sweep
from kvjax.engine.prefill import prefill as prefill
from kvjax.engine.prefill import sweep as sweep
from kvjax.engine.query_statistics import QueryStatistics as QueryStatistics
from kvjax.engine.query_statistics import calibrate_queries as calibrate_queries
from kvjax.engine.recitation import recited as recited
from kvjax.engine.rerotation import RotaryModel as RotaryModel
from kvjax.engine.sampling import Sampling as Sampling
from kvjax.engine.stream import Stream as Stream
from kvjax.engine.stream import stream as stream
from kvjax.engine.sweeping import Measured as Measured
from kvjax.errors import InputError as InputError
from kvjax.errors import InputWarning as InputWarning
from kvjax.model import Geometry as Geometry
from kvjax.model import LayerSpec as LayerSpec
from kvjax.model import Model as Model
from kvjax.model import Vocabulary as Vocabulary
from kvjax.options.budgets import Budget as Budget
from kvjax.options.budgets import PerLayer as PerLayer
from kvjax.options.budgets import Retention as Retention
from kvjax.options.budgets import Threshold as Threshold
from kvjax.options.budgets import Tokens as Tokens
from kvjax.options.schedules import Schedule as Schedule
from kvjax.prompts import Prompts as Prompts
from kvjax.registry.eviction import register_methods as _register_methods
from kvjax.registry.names import get_method as get_method
from kvjax.registry.names import get_plan as get_plan
from kvjax.registry.names import get_retrieval as get_retrieval
from kvjax.registry.registry import Recipe as Recipe
from kvjax.registry.registry import register as register
from kvjax.registry.retrieval import register_retrievals as _register_retrievals
from kvjax.registry.wrappers import register_prefix as register_prefix
from kvjax.repeat_request import RepeatRequest as RepeatRequest
from kvjax.retrieval.sparse_attention import SparseAttention as SparseAttention

if typing.TYPE_CHECKING:
  from kvjax import models as models
  from kvjax import testing as testing
  from kvjax.models import load as load

__version__ = importlib.metadata.version("kvjax")

_register_methods()
_register_retrievals()

# Importing a submodule makes it an attribute too; these are meant.
_MODULES = (allocation, methods, retrieval)
# Imported when they are first used: most of kvjax needs no models.
_LATE = ("load", "models", "testing")
__all__ = sorted(
  [
    name
    for name, value in globals().items()
    if name == "__version__"
    or not (name.startswith("_") or isinstance(value, types.ModuleType))
    or value in _MODULES
  ]
  + [*_LATE]
)


def __dir__() -> list[str]:
  return __all__


if not typing.TYPE_CHECKING:

  def __getattr__(name: str) -> object:
    """Imports what is in `_LATE`."""
    if name not in _LATE:
      raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    if name == "load":
      return importlib.import_module("kvjax.models").load
    return importlib.import_module(f"kvjax.{name}")
