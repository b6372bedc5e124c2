"""Pairs of layers' inputs and scores, one file per text."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from kvjax import files
from kvjax.engine.replay_targets import replay_targets
from kvjax.errors import InputError
from kvjax.experiments.finetuning import documents
from kvjax.experiments.gate_training.learner import Examples, Learner
from kvjax.hosts import read
from kvjax.methods.replay import Replay
from kvjax.models.pretrained import Pretrained
from kvjax.models.tokenizer import Tokenizer
from kvjax.prompts import Prompts
from kvjax.repeat_request import RepeatRequest

# What reading raises where something else has been written.
_UNLIKE = (
  OSError,
  TypeError,
  ValueError,
  LookupError,
  safetensors.SafetensorError,
)


def rows_of(
  texts: Sequence[str], tokenizer: Tokenizer, length: int, samples: int
) -> list[list[int]]:
  """Splits texts into parts of about equal length, behind the chat template.

  Parts of less than half the length are left out, so that attention is spread
  over as many tokens in all of them. If there are more than `samples`, they are
  taken from all texts alike.

  Raises:
    InputError: there are fewer than two parts.
  """
  prefix = list(RepeatRequest.of(tokenizer).prefix)
  begins = 0 if tokenizer.bos_id is None else 1
  parts = documents.chunks(texts, tokenizer, length + begins, 1).rows()
  rows = [
    [*prefix, *part[begins:]]
    for part in parts
    if 2 * (len(part) - begins) >= length
  ]
  if len(rows) < 2:
    raise InputError(
      f"The documents have {len(rows)} parts of {-(-length // 2)} tokens or "
      "more, and two are needed, to learn and to test; give more of them or a "
      "smaller --length."
    )
  places = np.linspace(0, len(rows) - 1, min(samples, len(rows)))
  return [rows[int(place)] for place in places]


def make(
  lm: Pretrained,
  row: Sequence[int],
  padded: int,
  count: int,
  number: int,
  learner: Learner,
) -> bytes:
  """Replays a text; returns a file with the pairs of some of its tokens.

  Args:
    lm: the model; if a mesh spans several hosts, all of them must call it.
    row: the tokens, with the chat template before them.
    padded: length that all texts are padded to.
    count: maximum number of tokens.
    number: index of the text, which with the learner's seed is that of the
      drawn tokens.
    learner: what will learn the pairs.
  """
  request = RepeatRequest.of(lm.text)
  prompts = Prompts.of([list(row)], padded, repeat_request=request)
  # One chunk, so that every query of the replay attends to the whole text.
  width = prompts.tokens.shape[1]
  replay = Replay(chunk=width, weight=learner.weight, of_text=True)
  layers = replay_targets(lm.model, lm.params, prompts, replay).values()
  scores = np.stack(read([x.scores[0] for x in layers]))
  replayed = np.flatnonzero(scores[0, 0] >= 0)
  random = np.random.default_rng((learner.seed, number))
  drawn = random.permutation(replayed)[:count]
  places = np.sort(drawn)
  inputs = np.stack(read([x.inputs[0, places] for x in layers]))
  targets = np.swapaxes(learner.targets(scores[:, :, places]), 1, 2)
  arrays = {
    "inputs": inputs.astype(jnp.bfloat16),
    "targets": np.ascontiguousarray(targets.astype(np.float32)),
  }
  return safetensors.numpy.save(arrays)


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[Any]:
  """Opens a file of safetensors that a run has written.

  Raises:
    InputError: it is none, or what is read of it is not there.
  """
  try:
    files.check_regular(path)
    with safetensors.safe_open(path, framework="numpy") as file:
      yield file
  except InputError:
    raise
  except _UNLIKE as error:
    raise InputError(
      f"{path} is not what a run writes; remove it, and the same command "
      "writes it anew."
    ) from error


def pairs_of(paths: Sequence[pathlib.Path], index: int) -> Examples:
  """Reads the pairs of one layer, of several texts.

  Args:
    paths: the files.
    index: place of the layer among those that are scored.

  Raises:
    InputError: see `opened`.
  """
  inputs, targets = [], []
  for path in paths:
    with opened(path) as file:
      inputs.append(np.asarray(file.get_slice("inputs")[index], np.float32))
      targets.append(file.get_slice("targets")[index])
  return Examples(np.concatenate(inputs), np.concatenate(targets))
