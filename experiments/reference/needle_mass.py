"""Measures which layers and heads attend to the needle."""

import random

import numpy as np
from jaxtyping import Float

from kvjax.activations import Activations
from kvjax.experiments.papers.analyses.observed import activations, weights
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.tasks import niah
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.pretrained import Pretrained

TASK = "niah_single_2"


def needle_mass(
  lm: Pretrained, samples: int, seed: int, length: int
) -> Float[np.ndarray, "L N"]:
  """Computes the share of attention on the needle's value.

  It is the attention of the token that predicts the value's first symbol, in
  prompts with one needle in prose, averaged over samples.
  """
  masses = []
  for number in range(samples):
    rng = random.Random(f"{seed} needle mass {number}")
    sample = niah.sample(niah.TASKS[TASK], rng, length, lm.text.count)
    masses.append(sample_mass(lm, sample))
  return np.mean(masses, axis=0)


def sample_mass(lm: Pretrained, sample: Sample) -> Float[np.ndarray, "L N"]:
  """Computes the share of attention on the needle's value in one sample."""
  prompt = Prompt.of_sample(lm.text, sample)
  value = lm.text.encode(sample.answers[0])
  # The answer starts with a blank, which is a separate token before digits.
  ids = prompt.context + prompt.question + lm.text.encode(" ")
  places = _places(prompt.context, value)
  layers = activations(lm, ids)
  return np.array([_mass(layer, places) for layer in layers])


def _places(ids: list[int], value: list[int]) -> slice:
  """Finds the first occurrence of a value's tokens."""
  size = len(value)
  start = next(n for n in range(len(ids)) if ids[n : n + size] == value)
  return slice(start, start + size)


def _mass(layer: Activations, places: slice) -> Float[np.ndarray, " N"]:
  """Computes the share of each head's last query."""
  keys = np.asarray(layer.keys[0], np.float64)
  queries = np.asarray(layer.queries[0, :, -1:], np.float64)
  group = len(queries) // len(keys)
  return np.array(
    [
      weights(query, keys[head // group], causal=False)[0, places].sum()
      for head, query in enumerate(queries)
    ]
  )
