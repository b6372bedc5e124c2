"""The attention mass of each key, without materializing all weights."""

from kvjax.kernels.attention_mass.api import causal_mass as causal_mass
from kvjax.kernels.attention_mass.api import chunk_mass as chunk_mass
