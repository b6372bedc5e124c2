"""Top-k selection: the slots of a head's largest scores."""

from kvjax.kernels.select.api import among_largest as among_largest
from kvjax.kernels.select.api import kth_largest as kth_largest
from kvjax.kernels.select.api import largest as largest
from kvjax.kernels.select.api import mask_to_slots as mask_to_slots
from kvjax.kernels.select.api import slots_to_mask as slots_to_mask
