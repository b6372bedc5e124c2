"""Writes the trained model as a Hugging Face directory with its card."""

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

from experiments.reference import training, vocabulary
from experiments.reference.checkpoints import Progress
from experiments.reference.curriculum import Stage
from experiments.reference.validation import Score, validate
from models import pretrained
from models.decoder import Decoder
from models.language_model import from_decoder
from models.tokenizer import Tokenizer

_SAMPLES = 60


def as_pretrained(decoder: Decoder) -> pretrained.Pretrained:
  """The decoder with the tokenizer, ready to answer or to be saved."""
  model, params = from_decoder(decoder)
  tokenizer = Tokenizer(
    vocabulary.build(), vocabulary.config(training.MAX_POSITIONS)
  )
  return pretrained.Pretrained(model, params, training.config(), tokenizer)


def table(scores: Sequence[Score]) -> str:
  """Markdown: a line per task, a column per length.

  A cell is the percentage of references found; where it differs, the
  percentage of samples with all of them follows in brackets.
  """
  lengths = sorted({score.length for score in scores})
  cells = {(score.task, score.length): score for score in scores}
  lines = [
    f"| task | {' | '.join(f'{length:,} tokens' for length in lengths)} |",
    "| --- |" + " ---: |" * len(lengths),
  ]
  for task in dict.fromkeys(score.task for score in scores):
    shown = " | ".join(_cell(cells[task, length]) for length in lengths)
    lines.append(f"| {task} | {shown} |")
  return "\n".join(lines)


def _cell(score: Score) -> str:
  found = f"{100 * score.contained:.1f}"
  if score.contained == score.whole:
    return found
  return f"{found} ({100 * score.whole:.1f})"


def card(
  state: Progress,
  seed: int,
  stages: Sequence[Stage],
  scores: Sequence[Score],
) -> str:
  """The model card; all its numbers come from the run itself."""
  decoder = training.config()
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  lines = "\n".join(
    f"| {stage.name} | {stage.length} x {stage.batch} | {stage.steps} | "
    f"{stage.rates[0]:.0e} to {stage.rates[1]:.0e} | "
    f"{', '.join(stage.mixture)} |"
    for stage in stages
  )
  return _CARD.format(
    parameters=parameters,
    layers=decoder.num_layers,
    width=decoder.hidden_size,
    heads=decoder.num_heads,
    kv_heads=decoder.num_kv_heads,
    head_dim=decoder.head_dim,
    inner=decoder.intermediate_size,
    vocabulary=decoder.vocab_size,
    positions=decoder.max_positions,
    longest=max(stage.length for stage in stages),
    steps=state.total,
    tokens=state.tokens / 1e6,
    minutes=state.seconds / 60,
    device=f"{jax.default_backend()}, {platform.machine()}",
    cores=os.cpu_count(),
    date=datetime.date.today().isoformat(),
    seed=seed,
    samples=scores[0].samples,
    table=table(scores),
    stages=lines,
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
  scores = []
  for score in validate(lm, _SAMPLES, seed):
    scores.append(score)
    print(f"{score.task} at {score.length}: {_cell(score)}", flush=True)
  pretrained.save(lm, directory)
  (directory / "README.md").write_text(card(state, seed, stages, scores))


_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---

# kvjax reference model

A {parameters:,}-parameter Llama, trained from scratch on synthetic retrieval
prompts, that answers needle-in-a-haystack questions with its full KV cache. It
exists so that methods of KV-cache compression can be compared offline, on a
CPU, in minutes. It is not a language model: it writes no text and answers no
other question.

- {layers} layers, width {width}, {heads} query heads on {kv_heads} KV heads of
  dimension {head_dim}, SwiGLU {inner}, RoPE base 500,000, tied, float32.
- {vocabulary:,} tokens: known words with their leading blank, else bytes;
  digits and the letters of UUIDs one by one.
- Trained on at most {longest:,} positions; the configuration admits
  {positions:,}, where answers are not tested.

## Scores

Full cache, greedy decoding, float32, {samples} fresh samples per cell, prose
from topics that training never saw. Percentage of references found; in
brackets, where it differs, the percentage of samples with all of them.

{table}

## Training

`python -m experiments.train_reference --output=DIR --seed={seed}` trains such a
model; other machines round otherwise, so their weights and scores differ a
little. Steps: {steps:,}, extensions of stages that missed their gate included.
Tokens: {tokens:.1f} million. Time in training steps: {minutes:.0f} minutes
({device}, {cores} cores). Seed: {seed}. Date: {date}.

Data are made on the fly: key-value pairs with a growing gap between key and
value, then needles, then whole prompts in RULER's wording (30 % of them in
other wordings), with haystacks of RULER's noise, of other needles and of prose
from CPython's language reference (`pydoc_data.topics`, PSF licence). Several
questions are asked about most contexts. 15 % of the keys are spelled with
random letters. A question about one key is answered with its values in the
order of the text (`1, 2, and 3.`), one about several keys with each key and
its value (`a: 1, b: 2, and c: 3.`). Loss: weight 1 on answers, 3 on the first
symbol of each key and value in them, 0.05 on the rest. AdamW (0.9, 0.98),
weight decay 0.01, gradients clipped at 1; the learning rate falls geometrically
within a stage.

| stage | length x rows | steps | learning rate | lessons |
| --- | --- | --- | --- | --- |
{stages}

## Limits

- It knows needles, and little but the wording it was taught. LongBench, chat
  and open questions are beyond it, and so are variable tracking and counting.
- Where the table has less than 95 %, long copies slip: the needle is found and
  a symbol of its value is wrong, most often at 2,048 tokens.
- Of several values of one key it finds the first and the last; those between
  it often skips or mixes up (`niah_multivalue`).
- A value is many tokens (7 digits, 36 symbols of a UUID), so a method that
  pools attention scores needs a kernel of at least 2 x symbols + 1 to keep it
  whole: 15 for numbers.
- Statistics of large models need not appear. In an earlier model of this
  recipe, keys with a *large* norm were the important ones, the reverse of
  what the key-norm method builds on. Methods that rest on sinks, key norms or
  key similarity may look better or worse here than on real models.
- A small model may route retrieval through very few heads, which exaggerates
  the effect of budgets per head or per layer.
- Do not tune a method on this model, and never compare its scores with
  published ones.
"""
