"""Attention of a block of queries to cached slots."""

from kvjax.kernels.attention.api import attention as attention
from kvjax.kernels.attention.api import partial_attention as partial_attention
from kvjax.kernels.attention.options import AttentionOptions as AttentionOptions
from kvjax.kernels.attention.partial import Partial as Partial
from kvjax.kernels.attention.partial import merge as merge
from kvjax.kernels.attention.partial import merge_devices as merge_devices
from kvjax.kernels.attention.partial import with_sinks as with_sinks
