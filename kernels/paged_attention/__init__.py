"""Attention over pages, each of which belongs to one KV head."""

from kvjax.kernels.paged_attention.api import paged_attention as paged_attention
from kvjax.kernels.paged_attention.spans import Span as Span
from kvjax.kernels.paged_attention.spans import Window as Window
