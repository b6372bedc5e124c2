"""Array programs that no library offers, each with a plain reference.

XLA runs all of them on any device. Pallas kernels replace it on TPUs and GPUs
for the shapes and dtypes they support. `use` chooses between the two,
`use_table` the kernels' block sizes.
"""

from kvjax.kernels.dispatch import OPERATIONS as OPERATIONS
from kvjax.kernels.dispatch import Implementation as Implementation
from kvjax.kernels.dispatch import use as use
from kvjax.kernels.tuning import use_table as use_table
