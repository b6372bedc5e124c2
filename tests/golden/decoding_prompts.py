"""The prompts of kvpress_decoding/, and the tokens that follow them.

make_kvpress_decoding.py makes goldens of them, and tests/models reads these.
"""

import json
import pathlib

import tiny_llama

SMOLLM2 = "smollm2-135m-instruct"
INTERVAL, TARGET, STEPS = 16, 61, 48
# The first is the target, so that every compression is from 77 tokens: the
# ranks of LagKV's eight partitions then fill the budget without ties.
LENGTHS = (61, 90)
# What PrefillDecodingPress removes of a prompt, as a share. Every compression
# while decoding then still removes tokens.
REMOVED = 0.2
# Answers begin prompts of so many more tokens.
_ANSWER = 1000
# Where prose begins in the contexts of kvpress_smollm2/.
_PROSE = 100


def prompt_of(name: str, length: int) -> list[int]:
  """The tokens of a prompt."""
  if name == SMOLLM2:
    return _prose(length)[:length]
  return tiny_llama.prompt(name, length)


def answer_to(name: str, length: int) -> list[int]:
  """The tokens that follow a prompt."""
  if name == SMOLLM2:
    return _prose(length)[length : length + STEPS]
  return tiny_llama.prompt(name, _ANSWER + length)[:STEPS]


def _prose(length: int) -> list[int]:
  """A text of its own for each length."""
  path = pathlib.Path(__file__).parent / "kvpress_smollm2" / "prompts.json"
  samples = json.loads(path.read_text(encoding="utf-8"))["samples"]
  return samples[LENGTHS.index(length)]["context"][_PROSE:]
