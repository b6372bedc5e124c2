"""What methods and models are tested with, in this project and others."""

from kvjax.testing.contract import check_method as check_method
from kvjax.testing.retrieval_contract import check_retrieval as check_retrieval
from kvjax.testing.tiny import TinyModel as TinyModel
from kvjax.testing.tiny import kept_positions as kept_positions
from kvjax.testing.tiny import layer_positions as layer_positions
from kvjax.testing.tiny import poisoned as poisoned
from kvjax.testing.tiny import poisoned_layer as poisoned_layer
from kvjax.testing.tiny import random_activations as random_activations
