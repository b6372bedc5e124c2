"""Writes the trained model as a Hugging Face directory with its card."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.reference import training, validation, vocabulary
from experiments.reference.card import Findings, card, cell
from experiments.reference.checkpoints import Progress
from experiments.reference.curriculum import Stage
from experiments.reference.needle_mass import needle_mass
from experiments.reference.validation import Score
from models import pretrained
from models.decoder import Decoder
from models.language_model import from_decoder
from models.tokenizer import Tokenizer

# So many keep all of it under ten minutes on two cores.
_SAMPLES = 60
_DEPTH_SAMPLES = 20
_MASS_SAMPLES = 20
_MASS_LENGTH = 1024


def as_pretrained(decoder: Decoder) -> pretrained.Pretrained:
  """The decoder with the tokenizer, ready to answer or to be saved."""
  model, params = from_decoder(decoder)
  tokenizer = Tokenizer(
    vocabulary.build(), vocabulary.config(training.MAX_POSITIONS)
  )
  return pretrained.Pretrained(model, params, decoder.config, tokenizer)


def measure(lm: pretrained.Pretrained, seed: int) -> Findings:
  """Asks the model all that its card reports, and prints it as it comes."""
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
  """Validates the model and writes weights, tokenizer and card."""
  lm = as_pretrained(decoder)
  found = measure(lm, seed)
  pretrained.save(lm, directory)
  (directory / "README.md").write_text(
    card(lm.config, state, seed, stages, found)
  )


def _printed(scores: Iterable[Score]) -> list[Score]:
  found = []
  for score in scores:
    print(f"{score.name} at {score.length}: {cell(score)}", flush=True)
    found.append(score)
  return found
