"""How much attention each key receives, without the matrix of weights."""

from kvjax.kernels.attention_mass.api import causal_mass as causal_mass
from kvjax.kernels.attention_mass.api import chunk_mass as chunk_mass
