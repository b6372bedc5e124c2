"""The bundled model's card, with numbers from its training and tests."""

import dataclasses
import datetime
import os
import pathlib
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
from kvjax.experiments.report import formats
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
  left = (0,) if numbers else range(len(header))
  return formats.grid(header, lines, left).rstrip()


_CARD = pathlib.Path(__file__).with_name("card.md").read_text("utf-8")
