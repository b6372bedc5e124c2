"""KV-cache compression for long-context language models, in JAX."""

from kvjax.activations import Activations as Activations
from kvjax.answering import answer as answer
from kvjax.answering import complete as complete
from kvjax.answering import converse as converse
from kvjax.answering import reserve as reserve
from kvjax.budgets import Budget as Budget
from kvjax.budgets import Retention as Retention
from kvjax.budgets import Tokens as Tokens
from kvjax.cache import Cache as Cache
from kvjax.cache import concatenate as concatenate
from kvjax.decoding import Answers as Answers
from kvjax.decoding import Decoding as Decoding
from kvjax.errors import InputError as InputError
from kvjax.layers import LayerCache as LayerCache
from kvjax.methods import get_method as get_method
from kvjax.model import Geometry as Geometry
from kvjax.model import Model as Model
from kvjax.plans import Plan as Plan
from kvjax.prefilling import prefill as prefill
from kvjax.prefilling import sweep as sweep
from kvjax.prompts import Prompts as Prompts
from kvjax.sampling import Sampling as Sampling
from kvjax.saving import load_cache as load_cache
from kvjax.saving import save_cache as save_cache
from kvjax.schedules import Schedule as Schedule
