"""KV-cache compression for long-context language models, in JAX."""

from kvjax.activations import Activations as Activations
from kvjax.cache.cache import Cache as Cache
from kvjax.cache.cache import concatenate as concatenate
from kvjax.cache.layers import LayerCache as LayerCache
from kvjax.calibration.fitting import Triples as Triples
from kvjax.calibration.fitting import calibrate as calibrate
from kvjax.calibration.fitting import nll_ratio as nll_ratio
from kvjax.calibration.record import Calibrated as Calibrated
from kvjax.calibration.record import Calibration as Calibration
from kvjax.checkpoint.saving import load_cache as load_cache
from kvjax.checkpoint.saving import save_cache as save_cache
from kvjax.engine.answering import answer as answer
from kvjax.engine.answering import complete as complete
from kvjax.engine.answering import converse as converse
from kvjax.engine.answering import reserve as reserve
from kvjax.engine.decoding import Answers as Answers
from kvjax.engine.decoding import Decoding as Decoding
from kvjax.engine.likelihood import answer_nll as answer_nll
from kvjax.engine.likelihood import (
  negative_log_likelihood as negative_log_likelihood,
)
from kvjax.engine.plans import Plan as Plan
from kvjax.engine.prefilling import Measured as Measured
from kvjax.engine.prefilling import measured_sweep as measured_sweep
from kvjax.engine.prefilling import prefill as prefill
from kvjax.engine.prefilling import sweep as sweep
from kvjax.engine.sampling import Sampling as Sampling
from kvjax.errors import InputError as InputError
from kvjax.methods import get_method as get_method
from kvjax.model import Geometry as Geometry
from kvjax.model import Model as Model
from kvjax.options.budgets import Budget as Budget
from kvjax.options.budgets import Retention as Retention
from kvjax.options.budgets import Tokens as Tokens
from kvjax.options.named_plans import get_plan as get_plan
from kvjax.options.schedules import Schedule as Schedule
from kvjax.prompts import Prompts as Prompts
from kvjax.retrieval import get_retrieval as get_retrieval
from kvjax.retrieval.lookups import Lookup as Lookup
