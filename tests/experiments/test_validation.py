"""What the reference model's card reports, measured on known answers."""

import random

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.engine.forward import hidden_states
from kvjax.experiments.reference import (
  attention,
  card,
  curriculum,
  progress,
  training,
  validation,
)
from kvjax.experiments.reference.needle_mass import sample_mass
from kvjax.experiments.reference.validation import Score
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.tasks import niah

POSITIONS = 512
PAIR = niah.NeedleTask("two", "essay", key_count=2, max_new_tokens=9)


@pytest.fixture
def oracle(monkeypatch):
  """Answers from the first half of a context, whole as it would be."""

  def answers(lm, prompts, shape):
    for prompt in prompts:
      half = prompt.context[: len(prompt.context) // 2]
      yield lm.tokenizer.decode(half)

  monkeypatch.setattr(validation, "_answers", answers)


@pytest.mark.usefixtures("oracle")
def test_the_depth_grid_asks_at_every_depth(tiny):
  found = list(validation.depth_grid(tiny, 3, 0, (320, 384), (0.0, 0.9, 1.0)))
  assert found == [
    Score(depth, length, 3, right, right)
    for length in (320, 384)
    for depth, right in (("0 %", 1.0), ("90 %", 0.0), ("100 %", 0.0))
  ]


def test_a_score_counts_references_and_whole_samples():
  assert Score.of("x", 512, [1.0, 0.5, 1.0, 0.0]) == Score(
    "x", 512, 4, 0.625, 0.5
  )


def test_rounds_are_scored_one_by_one(tiny, monkeypatch):
  asked = []

  def generate_rounds(lm, conversations):
    asked.append(len(conversations))
    return [
      [turns[0].answers[0], "no", turns[0].answers[0]]
      for turns in conversations
    ]

  monkeypatch.setattr(validation, "generate_rounds", generate_rounds)
  found = list(validation.rounds(tiny, 6, 0, (480,), 3))
  assert asked == [4, 2]
  assert [(s.name, s.length, s.samples, s.whole) for s in found] == [
    ("round 1", 480, 6, 1.0),
    ("round 2", 480, 6, 0.0),
    ("round 3", 480, 6, 0.0),
  ]


def test_a_conversation_answers_as_its_transcript_does(tiny):
  """Each round again from scratch, from one prompt with all that was said."""
  rows = [
    niah.conversation(PAIR, random.Random(n), 280, tiny.tokenizer.count)
    for n in range(2)
  ]
  decoding = kvjax.Decoding(9, tiny.tokenizer.eos_ids)
  plan = kvjax.get_plan("full", kvjax.Retention(1.0))
  newline = tiny.tokenizer.encode("\n")
  for turns, said in zip(
    rows, validation.generate_rounds(tiny, rows), strict=True
  ):
    transcript = Prompt.of_sample(tiny.tokenizer, turns[0]).context
    for turn, text in zip(turns, said, strict=True):
      transcript = transcript + Prompt.of_sample(tiny.tokenizer, turn).question
      # As wide as all of them, for one compiled program.
      prompt = kvjax.Prompts.of([transcript], POSITIONS)
      cache, logits = kvjax.prefill(tiny.model, tiny.params, prompt, plan)
      answers = kvjax.generate(tiny.model, tiny.params, cache, logits, decoding)
      (ids,) = answers.rows()
      assert len(ids) > 0
      assert text == tiny.tokenizer.decode(ids)
      transcript = [*transcript, *ids, tiny.tokenizer.eos_ids[0], *newline]


def test_the_mass_on_the_needle_is_that_of_the_whole_matrix(tiny):
  task = niah.TASKS["niah_single_2"]
  sample = niah.sample(task, random.Random(1), 300, tiny.tokenizer.count)
  prompt = Prompt.of_sample(tiny.tokenizer, sample)
  blank = tiny.tokenizer.encode(" ")
  row = prompt.context + prompt.question + blank
  text = [tiny.tokenizer.decode([i]) for i in row]
  value = sample.answers[0]
  start = next(
    i for i in range(len(text)) if "".join(text[i : i + len(value)]) == value
  )
  places = np.arange(len(row), dtype=np.int32)[None]

  @jax.jit
  def activations(params, ids, places):
    seen = []

    def attend(layer, state, block):
      seen.append(block)
      return attention.causal_attention(block), state

    hidden_states(tiny.model, params, ids, places, (None, None), attend)
    return [(block.queries, block.keys) for block in seen]

  seen = activations(tiny.params, np.asarray([row], np.int32), places)
  found = sample_mass(tiny, sample)
  assert found.shape == (2, 4)
  for layer, head in np.ndindex(2, 4):
    queries, keys = (np.asarray(x, np.float64) for x in seen[layer])
    query, keys = queries[0, head, -1], keys[0, head // 2]
    weights = np.exp(keys @ query / 8**0.5)
    expected = weights[start : start + len(value)].sum() / weights.sum()
    np.testing.assert_allclose(found[layer, head], expected, rtol=1e-4)


def scores(*shares):
  return [
    Score(name, length, 8, contained, whole)
    for (name, length), (contained, whole) in zip(
      [("one", 512), ("many", 512), ("one", 1024), ("many", 1024)],
      shares,
      strict=True,
    )
  ]


FINE = scores((1.0, 1.0), (0.96875, 0.875), (0.95, 0.95), (1.0, 1.0))
POOR = scores((1.0, 1.0), (0.96875, 0.875), (0.5, 0.5), (0.5, 0.25))


def test_tables_have_a_line_per_task_and_a_column_per_length():
  assert card.table(POOR, "task") == (
    "| task | 512 tokens | 1,024 tokens |\n"
    "| :-- | --: | --: |\n"
    "| one | 100.0 | 50.0 |\n"
    "| many | 96.9 (87.5) | 50.0 (25.0) |"
  )
  mass = np.asarray([[0.0, 0.5], [0.25, 0.25]])
  assert card.mass_table(mass).splitlines()[2:] == [
    "| 1 | 0.250 | 0.500 |",
    "| 2 | 0.250 | 0.250 |",
  ]


def test_only_weak_cells_are_among_the_limits():
  assert card.weak_cells(FINE) == ""
  assert card.weak_cells(POOR) == (
    "- Fewer than 95 % of the references are found in `one` at 1,024 tokens "
    "(50.0 %),\n  `many` at 1,024 tokens (50.0 %).\n"
  )


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [FINE, POOR])
def test_the_card_says_what_the_run_was(tasks):
  _, params = nnx.split(training.initial_decoder(0))
  state = progress.Progress(params, None, 2, 0, 1, 1234, 5_600_000, 7200.0)
  found = card.Findings(
    tasks,
    depths=[Score("44 %", 512, 5, 0.8, 0.8)],
    rounds=[Score("round 2", 1024, 6, 1.0, 1.0)],
    mass=np.full((4, 4), 0.125),
    mass_length=1024,
    mass_samples=7,
  )
  config = training.config()
  text = card.card(config, state, 3, curriculum.STAGES[:2], found)
  for said in (
    f"of\n  dimension {config.head_dim}, ",
    f"RoPE base {config.rope.theta:,.0f}, tied\n  embeddings; weights in "
    "float16.",
    "Trained on at most 32 positions; the configuration admits\n  4,096, but "
    "beyond 1,024 nothing",
    "8 fresh samples per cell",
    "5 samples per cell",
    "| 44 % | 80.0 |",
    "(6 conversations)",
    "| round 2 | 100.0 |",
    "1,024 tokens, 7 samples",
    "| 4 | 0.125 | 0.125 |",
    "Steps: 1,234, ",
    "Tokens: 5.6 million",
    "120 minutes",
    "--seed=3",
    "| seed-16 | 4 | 16 x 128 | 400 | 0.002 | gapped, pairs |",
  ):
    assert said in text
  assert ("Fewer than" in text) == (tasks is POOR)
