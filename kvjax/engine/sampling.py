"""Sampling of the next token from its logits."""

import dataclasses
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import InputError
from kvjax.kernels.select.keys import ordered
from kvjax.options.bounds import check_count, check_number
from kvjax.struct import static, struct

# Other temperatures draw as the nearest of these: the inverse of the lower one
# times a logit is finite, and that of the upper one is not 0.
_LEAST, _MOST = 1e-30, 1e37


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is drawn.

  A draw depends on the seed of its row and on the position of the token. By
  default the seeds are the numbers of the rows, so that copies of one prompt in
  a batch get different answers. A row of a batch therefore answers as it does
  alone only if it has the same seed, as `seeds` of `kvjax.generate` gives it.

  Raises InputError if a number is out of range, or `top_p` or `top_k` is set at
  a temperature of 0.

  Attributes:
    temperature: 0 takes the most likely token; a positive value divides the
      logits.
    top_p: draws among the most likely tokens that together reach this
      probability; like `top_k`, for temperatures above 0.
    top_k: draws among this many most likely tokens, before `top_p`; 0 for all.

  Examples:
    >>> import kvjax
    >>> kvjax.Sampling(temperature=0.7, top_p=0.9)
    Sampling(temperature=0.7, top_p=0.9, top_k=0)
  """

  temperature: float = 0.0
  top_p: float = 1.0
  top_k: int = 0

  def __post_init__(self) -> None:
    check_number("temperature", self.temperature)
    check_number("top_p", self.top_p)
    if not 0 <= self.temperature < math.inf:
      raise InputError(
        "temperature must be a finite number of 0 or more; "
        f"{self.temperature:g} is not."
      )
    if not 0 < self.top_p <= 1:
      raise InputError(
        f"top_p must be above 0 and at most 1; {self.top_p:g} is not."
      )
    check_count("top_k", self.top_k, 0)
    if not self.temperature and (self.top_p < 1 or self.top_k):
      raise InputError(
        "top_p and top_k change nothing at a temperature of 0, which takes the "
        "most likely token; give a temperature, such as 1.0."
      )
    # Arrays are not hashable, and this is part of what is compiled.
    object.__setattr__(self, "top_k", operator.index(self.top_k))


GREEDY = Sampling()


@struct
class SamplingInputs:
  """A `Sampling` for a compiled program, which takes its numbers as arguments.

  Only what changes the program is static: whether there is a number, and how
  many tokens `top_k` takes.

  Attributes:
    scale: what logits are multiplied by, 1 / temperature; None takes the most
      likely token.
    top_p: the probability that the most likely tokens reach; None for all.
    top_k: number of the most likely tokens; 0 for all.
  """

  scale: Float[Array, ""] | None = None
  top_p: Float[Array, ""] | None = None
  top_k: int = static(default=0)

  @classmethod
  def of(cls, sampling: Sampling) -> "SamplingInputs":
    """Makes arrays of the numbers."""
    if sampling.temperature == 0:
      return cls()
    # Inverted here, as XLA inverts constants: a device may divide less exactly.
    scale = 1 / np.float32(np.clip(sampling.temperature, _LEAST, _MOST))
    top_p = None
    if sampling.top_p < 1:
      top_p = jnp.asarray(sampling.top_p, jnp.float32)
    return cls(jnp.asarray(scale, jnp.float32), top_p, sampling.top_k)


def sample(
  logits: Float[Array, "B V"],
  sampling: SamplingInputs,
  seeds: Int[Array, " B"],
  positions: Int[Array, " B"],
) -> Int[Array, " B"]:
  """Draws one token per row.

  A row's draw depends on its seed and position only.

  Args:
    logits: float32 logits.
    sampling: greedy, or temperature and nucleus.
    seeds: one seed per row.
    positions: position of the token that is drawn.
  """
  if sampling.scale is None:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = logits * sampling.scale
  if 0 < sampling.top_k < logits.shape[-1]:
    # Tokens that tie with the last of them stay, too.
    least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
    logits = jnp.where(logits >= least, logits, -jnp.inf)
  if sampling.top_p is not None:
    logits = _nucleus(logits, sampling.top_p)

  def draw(
    row: Float[Array, " V"], seed: Int[Array, ""], position: Int[Array, ""]
  ) -> Int[Array, ""]:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.categorical(key, row).astype(jnp.int32)

  return jax.vmap(draw)(logits, seeds, positions)


def _nucleus(
  logits: Float[Array, "B V"], top_p: Float[Array, ""]
) -> Float[Array, "B V"]:
  """Masks all but the fewest most likely tokens that reach `top_p`.

  Bisection finds the least likely of them in 32 passes over the vocabulary,
  where to sort it takes many times as long.
  """
  share, keys = jax.nn.softmax(logits), ordered(logits)
  # The most likely token stays even if `top_p` is too small for float32.
  top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)

  def share_above(key: Int[Array, "B 1"]) -> Float[Array, "B 1"]:
    return jnp.sum(jnp.where(keys > key, share, 0.0), axis=-1, keepdims=True)

  def halve(
    _: Int[Array, ""], bounds: tuple[Int[Array, "B 1"], Int[Array, "B 1"]]
  ) -> tuple[Int[Array, "B 1"], Int[Array, "B 1"]]:
    low, high = bounds
    middle = (low & high) + ((low ^ high) >> 1)  # their sum could overflow
    lacks = share_above(middle) < top_p
    return jnp.where(lacks, low, middle + 1), jnp.where(lacks, middle, high)

  # The lowest key above which tokens do not reach `top_p`.
  bounds = (
    jnp.min(keys, axis=-1, keepdims=True),
    jnp.max(keys, axis=-1, keepdims=True),
  )
  least, _ = jax.lax.fori_loop(0, 32, halve, bounds)
  tied = keys == least
  # Of equally likely tokens, as many of the first ones as are needed.
  number = tied.astype(jnp.float32)
  before = jnp.cumsum(number, axis=-1) - number
  own = jnp.max(jnp.where(tied, share, 0.0), axis=-1, keepdims=True)
  lacks = share_above(least) + before * own < top_p
  kept = (keys > least) | (tied & ((before == 0) | lacks))
  return jnp.where(kept, logits, -jnp.inf)
