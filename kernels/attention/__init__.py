"""Attention of a block of queries over cached slots."""

from kernels.attention.api import attention as attention
from kernels.attention.api import partial_attention as partial_attention
from kernels.attention.options import AttentionOptions as AttentionOptions
from kernels.attention.partial import Partial as Partial
from kernels.attention.partial import merge as merge
from kernels.attention.partial import with_sinks as with_sinks
