"""Directions of vectors."""

import numpy as np
from jaxtyping import Float

# Shorter vectors are as good as zero, and stay so.
_LEAST = 1e-12


def unit(x: Float[np.ndarray, "*A D"]) -> Float[np.ndarray, "*A D"]:
  """Scales rows to length 1; zero rows stay zero."""
  return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), _LEAST)
