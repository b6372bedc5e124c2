"""Checks and test data for methods and models, also of other packages."""

from kvjax.testing.contract import check_method as check_method
from kvjax.testing.model_contract import check_model as check_model
from kvjax.testing.retrieval_contract import check_retrieval as check_retrieval
from kvjax.testing.tiny import TinyModel as TinyModel
from kvjax.testing.tiny import kept_positions as kept_positions
from kvjax.testing.tiny import layer_positions as layer_positions
from kvjax.testing.tiny import poison_cache as poison_cache
from kvjax.testing.tiny import poison_layer as poison_layer
from kvjax.testing.tiny import random_activations as random_activations
