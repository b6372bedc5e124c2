"""Writes the trained model as a Hugging Face directory with its card."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from kvjax import files
from kvjax.experiments.reference import training, validation, vocabulary
from kvjax.experiments.reference.card import Findings, card, cell
from kvjax.experiments.reference.curriculum import Stage
from kvjax.experiments.reference.needle_mass import needle_mass
from kvjax.experiments.reference.progress import Progress
from kvjax.experiments.reference.validation import Score
from kvjax.models import pretrained, saving
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder
from kvjax.models.tokenizer import Tokenizer

# Half the size of the trained weights; the card's scores use the rounded ones.
_STORED = jnp.float16

# Sample counts that keep validation under ten minutes on two cores.
_SAMPLES = 60
_DEPTH_SAMPLES = 20
_MASS_SAMPLES = 20
_MASS_LENGTH = 1024


def as_pretrained(decoder: Decoder) -> pretrained.Pretrained:
  """Combines the decoder with its tokenizer."""
  model, params = from_decoder(decoder)
  tokenizer = Tokenizer(
    vocabulary.build(), vocabulary.config(training.MAX_POSITIONS)
  )
  return pretrained.Pretrained(model, params, tokenizer)


def measure(lm: pretrained.Pretrained, seed: int) -> Findings:
  """Measures everything in the model's card and prints it on the way."""
  return Findings(
    tasks=_printed(validation.validate(lm, _SAMPLES, seed)),
    depths=_printed(validation.depth_grid(lm, _DEPTH_SAMPLES, seed)),
    rounds=_printed(validation.rounds(lm, _SAMPLES, seed)),
    mass=needle_mass(lm, _MASS_SAMPLES, seed, _MASS_LENGTH),
    mass_length=_MASS_LENGTH,
    mass_samples=_MASS_SAMPLES,
  )


def save(
  decoder: Decoder,
  state: Progress,
  seed: int,
  stages: Sequence[Stage],
  directory: Path,
) -> None:
  """Writes weights and tokenizer, validates them, and writes the card.

  Weights are rounded to float16 and validated after loading them in float32.
  """
  store(as_pretrained(decoder), directory)
  lm = pretrained.load(directory, "float32")
  results = measure(lm, seed)
  files.write_text(
    directory / "README.md", card(lm.config, state, seed, stages, results)
  )


def store(lm: pretrained.Pretrained, directory: Path) -> None:
  """Writes the model in float16."""
  params = jax.tree.map(lambda leaf: leaf.astype(_STORED), lm.params)
  saving.save(dataclasses.replace(lm, params=params), directory)


def _printed(scores: Iterable[Score]) -> list[Score]:
  results = []
  for score in scores:
    print(f"{score.name} at {score.length}: {cell(score)}", flush=True)
    results.append(score)
  return results
