"""Causal self-attention of whole prompts, by library kernels."""

from kvjax.kernels.prompt_attention.api import (
  prompt_attention as prompt_attention,
)
