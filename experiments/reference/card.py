"""The bundled model's card, with numbers from its training and tests."""

import dataclasses
import datetime
import os
import platform
import textwrap
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Float

from kvjax.experiments.reference import needle_mass, training, validation
from kvjax.experiments.reference.curriculum import Stage
from kvjax.experiments.reference.pieces import SPELLED_SHARE
from kvjax.experiments.reference.progress import Progress
from kvjax.experiments.reference.prompts import VARIED_SHARE
from kvjax.experiments.reference.rows import BACKGROUND_WEIGHT, FIRST_WEIGHT
from kvjax.experiments.reference.validation import Score
from kvjax.models.config import DecoderConfig

# The target score; the card lists the cells below it.
_ENOUGH = 0.95


@dataclasses.dataclass(frozen=True)
class Findings:
  """Measurements of the trained model.

  Attributes:
    tasks: scores of the tasks.
    depths: scores of a single needle by its depth.
    rounds: scores of the rounds of a conversation.
    mass: attention on the needle per layer and query head, see `needle_mass`.
    mass_length: tokens of the prompts of `mass`.
    mass_samples: number of these prompts.
  """

  tasks: Sequence[Score]
  depths: Sequence[Score]
  rounds: Sequence[Score]
  mass: Float[np.ndarray, "L N"]
  mass_length: int
  mass_samples: int


def card(
  decoder: DecoderConfig,
  state: Progress,
  seed: int,
  stages: Sequence[Stage],
  findings: Findings,
) -> str:
  """Formats the card as Markdown with the Hub's header."""
  leaves = jax.tree.leaves(state.params)
  return _CARD.format(
    parameters=sum(leaf.size for leaf in leaves),
    layers=decoder.num_layers,
    width=decoder.hidden_size,
    heads=decoder.num_heads,
    kv_heads=decoder.num_kv_heads,
    head_dim=decoder.head_dim,
    inner=decoder.intermediate_size,
    theta=decoder.rope.theta,
    tied="tied" if decoder.tie_embeddings else "untied",
    vocabulary=decoder.vocab_size,
    positions=decoder.max_positions,
    longest=max(stage.length for stage in stages),
    tested=max(score.length for score in findings.tasks),
    steps=state.total,
    tokens=state.tokens / 1e6,
    minutes=state.seconds / 60,
    device=f"{jax.default_backend()}, {platform.machine()}",
    cores=os.cpu_count(),
    date=datetime.date.today().isoformat(),
    seed=seed,
    samples=findings.tasks[0].samples,
    table=table(findings.tasks, "task"),
    depth_task=validation.DEPTH_TASK,
    depth_samples=findings.depths[0].samples,
    depths=table(findings.depths, "depth"),
    conversations=findings.rounds[0].samples,
    rounds=table(findings.rounds, "round"),
    mass_task=needle_mass.TASK,
    mass_length=findings.mass_length,
    mass_samples=findings.mass_samples,
    mass=mass_table(findings.mass),
    varied=100 * VARIED_SHARE,
    spelled=100 * SPELLED_SHARE,
    first=FIRST_WEIGHT,
    background=BACKGROUND_WEIGHT,
    betas=training.BETAS,
    decay=training.WEIGHT_DECAY,
    clip=training.MOST_NORM,
    stages=_stage_lines(stages),
    weak=weak_cells(findings.tasks),
  )


def table(scores: Sequence[Score], head: str) -> str:
  """Formats a table with a line per task, depth or round, a column per length.

  A cell is the percentage of references found, followed in parentheses by the
  percentage of samples with all of them, if different.
  """
  lengths = sorted({score.length for score in scores})
  cells = {(score.name, score.length): cell(score) for score in scores}
  names = dict.fromkeys(score.name for score in scores)
  return _markdown(
    [head, *(f"{length:,} tokens" for length in lengths)],
    [[name, *(cells[name, length] for length in lengths)] for name in names],
  )


def cell(score: Score) -> str:
  """Formats a score for the tables."""
  contained = f"{100 * score.contained:.1f}"
  if score.contained == score.whole:
    return contained
  return f"{contained} ({100 * score.whole:.1f})"


def mass_table(mass: Float[np.ndarray, "L N"]) -> str:
  """Formats a table with the mean and maximum over heads of each layer."""
  return _markdown(
    ["layer", "mean of heads", "largest head"],
    [
      [str(layer), f"{heads.mean():.3f}", f"{heads.max():.3f}"]
      for layer, heads in enumerate(mass, start=1)
    ],
  )


def weak_cells(scores: Sequence[Score]) -> str:
  """Formats an item of the list of limitations; empty if all scores suffice."""
  weak = [
    f"`{score.name}` at {score.length:,} tokens ({100 * score.contained:.1f} %)"
    for score in scores
    if score.contained < _ENOUGH
  ]
  if not weak:
    return ""
  point = (
    f"- Fewer than {100 * _ENOUGH:.0f} % of the references are found in "
    f"{', '.join(weak)}."
  )
  return textwrap.fill(point, 80, subsequent_indent="  ") + "\n"


def _stage_lines(stages: Sequence[Stage]) -> str:
  return _markdown(
    ["stage", "layers", "length x rows", "steps", "learning rate", "lessons"],
    [
      [
        stage.name,
        str(depth),
        f"{stage.length} x {stage.batch}",
        str(stage.steps),
        " to ".join(f"{rate:g}" for rate in dict.fromkeys(stage.rates)),
        ", ".join(stage.mixture),
      ]
      for stage, depth in zip(stages, _depths(stages), strict=True)
    ],
    numbers=False,
  )


def _depths(stages: Sequence[Stage]) -> Iterator[int]:
  """Yields the number of layers in each stage."""
  depth = training.config().num_layers
  for stage in stages:
    depth = stage.layers or depth
    yield depth


def _markdown(
  header: Sequence[str], lines: Sequence[Sequence[str]], numbers: bool = True
) -> str:
  """Formats a table; `numbers` right-aligns all columns but the first."""
  rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
  return "\n".join(
    f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)
  )


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
  dimension {head_dim}, SwiGLU {inner}, RoPE base {theta:,.0f}, {tied}
  embeddings; weights in float16.
- {vocabulary:,} tokens: known words with their leading blank, else bytes;
  digits and the letters of UUIDs one by one.
- Trained on at most {longest:,} positions; the configuration admits
  {positions:,}, but beyond {tested:,} nothing is tested.

## Scores

Full cache, greedy decoding, float32, {samples} fresh samples per cell, prose
from topics that training never saw. Percentage of references found; in
brackets, where it differs, the percentage of samples with all of them.

{table}

By the depth of the needle (`{depth_task}`, {depth_samples} samples per cell):

{depths}

In a conversation, where each round asks for another needle and questions and
answers stay in the cache ({conversations} conversations):

{rounds}

## Attention on the needle

Share of the attention that lies on the needle's value where its first symbol is
read (`{mass_task}` at {mass_length:,} tokens, {mass_samples} samples):

{mass}

## Training

`python -m kvjax.experiments.train_reference --output=DIR --seed={seed}`
trains such a model; other machines round otherwise, so their weights and scores
differ a little. Steps: {steps:,}, extensions of stages that missed their
gate included.
Tokens: {tokens:.1f} million. Time in training steps: {minutes:.0f} minutes
({device}, {cores} cores). Seed: {seed}. Date: {date}.

Data are made on the fly: key-value pairs with a growing gap between key and
value, then needles, then whole prompts in RULER's wording ({varied:.0f} % of
them in other wordings), with haystacks of RULER's noise, of other needles and
of prose from CPython's language reference (`pydoc_data.topics`, PSF licence).
Several questions are asked about most contexts. {spelled:.0f} % of the keys are
spelled with random letters. A question about one key is answered with its
values in the order of the text (`1, 2, and 3.`), one about several keys with
each key and its value (`a: 1, b: 2, and c: 3.`). Loss: weight 1 on answers,
{first:g} on the first symbol of each key and value in them, {background:g} on
the rest. AdamW {betas}, weight decay {decay:g}, gradients clipped at {clip:g};
learning rates change geometrically within a stage. Layers that are added
between two stages answer zero at first; Adam then starts anew.

{stages}

## Limits

- It knows needles, and little but the wording it was taught. LongBench, chat
  and open questions are beyond it, and so are variable tracking and counting.
{weak}\
- A value is many tokens (7 digits, 36 symbols of a UUID), so a method that
  pools attention scores needs a kernel of at least 2 x symbols + 1 to keep it
  whole: 15 for numbers.
- Statistics of large models need not appear. In an earlier model of this
  recipe, keys with a *large* norm were the important ones, the reverse of
  what the key-norm method builds on. Methods that rest on sinks, key norms or
  key similarity may look better or worse here than on real models.
- A small model may route retrieval through very few layers and heads, which
  exaggerates the effect of budgets per head or per layer.
- Do not tune a method on this model, and never compare its scores with
  published ones.
"""
