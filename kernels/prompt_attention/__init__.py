"""Attention of whole prompts to themselves, which libraries compute."""

from kvjax.kernels.prompt_attention.api import (
  prompt_attention as prompt_attention,
)
