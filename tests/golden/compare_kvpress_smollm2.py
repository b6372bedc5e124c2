"""Compares kvjax with kvpress on SmolLM2-135M-Instruct, press by press.

  python tests/golden/compare_kvpress_smollm2.py

computes with kvjax what make_kvpress_smollm2.py has stored in kvpress_smollm2/
and writes the table of docs/kvpress.md. tests/models/test_kvpress_smollm2.py
asserts the same.
"""

import functools
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.engine.compress import Evaluation, evaluate_layer
from kvjax.engine.forward import attend_to_prompt, hidden_states
from kvjax.experiments.metrics.string_match import string_match_all
from kvjax.models.pretrained import Pretrained, load

MODEL = "smollm2-135m-instruct"
GOLDEN = pathlib.Path(__file__).parent / "kvpress_smollm2"
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "kvpress.md"
PERCENTS = (50, 75)
MOST_TOKENS = 12
FULL = "full_0"
# Scores that differ by less, relative to their size, are equal but for the
# order of float32 sums.
TIE = 1e-4


class Counterpart(NamedTuple):
  """A press and the method of kvjax that equals it.

  Attributes:
    press: as kvpress writes it, with the options that are not its defaults.
    method: as `kvjax.get_plan` reads it.
    retention: whether the budget is a share; else it is the number of tokens
      that the press keeps.
  """

  press: str
  method: str
  retention: bool = False


_COMPACTOR = "compactor:z_scope=layer:sketch_dim=48"
COUNTERPARTS = {
  "knorm": Counterpart("KnormPress", "key_norm"),
  "keydiff": Counterpart("KeyDiffPress", "keydiff"),
  "snapkv": Counterpart("SnapKVPress", "snapkv.kvpress"),
  "tova": Counterpart("TOVAPress", "tova.kvpress"),
  "observed": Counterpart("ObservedAttentionPress", "h2o.kvpress"),
  "streaming": Counterpart("StreamingLLMPress", "streaming"),
  "rerotated": Counterpart(
    "KeyRerotationPress(StreamingLLMPress)", "streaming:rerotate=true"
  ),
  "lagkv": Counterpart("LagKVPress", "lagkv.kvpress"),
  "lagkv_cross": Counterpart(
    "LagKVPress, cross_scoring=True", "lagkv.kvpress:cross_scoring=true"
  ),
  "pyramidkv": Counterpart("PyramidKVPress", "pyramid/snapkv.kvpress", True),
  "pyramidkv_2": Counterpart(
    "PyramidKVPress, beta=2", "pyramid/snapkv.kvpress:beta=2", True
  ),
  "adakv": Counterpart(
    "AdaKVPress(SnapKVPress), alpha_safeguard=0", "ada/snapkv.kvpress:alpha=0"
  ),
  "adakv_keydiff": Counterpart(
    "AdaKVPress(KeyDiffPress), alpha_safeguard=0", "ada/keydiff:alpha=0"
  ),
  "chunkkv": Counterpart(
    "ChunkKVPress(SnapKVPress, window_size=36, kernel_size=1), chunk_length=20",
    "chunkkv:window=36:chunk=20",
  ),
  "leverage": Counterpart(
    "LeverageScorePress",
    f"{_COMPACTOR}:solver=chol:center=true:blend=1e9",
  ),
  "noncausal": Counterpart(
    "NonCausalAttnPress, chunk_size=259", f"{_COMPACTOR}:chunk=259:blend=0.0"
  ),
  "compactor": Counterpart("CompactorPress", "compactor.kvpress"),
}
# The methods whose kept tokens have new positions.
RENUMBERED = ("rerotated",)


@functools.cache
def samples() -> list[dict[str, Any]]:
  """The prompts, in their order."""
  text = (GOLDEN / "prompts.json").read_text(encoding="utf-8")
  return json.loads(text)["samples"]


@functools.cache
def their_answers() -> dict[str, list[list[int]]]:
  """What kvpress answers, by case and prompt."""
  return json.loads((GOLDEN / "answers.json").read_text(encoding="utf-8"))


@functools.cache
def their_kept(prompt: int) -> dict[str, np.ndarray]:
  """What kvpress keeps of a prompt, by case: bool [L, K, n]."""
  length = len(samples()[prompt]["context"])
  with np.load(GOLDEN / f"kept_{prompt}.npz") as stored:
    return {
      case: np.unpackbits(bits, axis=-1, count=length).astype(bool)
      for case, bits in stored.items()
    }


def stored_prompts() -> list[int]:
  """The prompts whose kept tokens are stored."""
  return sorted(int(path.stem.split("_")[1]) for path in GOLDEN.glob("kept_*"))


def cases(names: Sequence[str] = tuple(COUNTERPARTS)) -> list[str]:
  """Presses with the share that they remove, in percent."""
  return [f"{name}_{percent}" for name in names for percent in PERCENTS]


def percent_of(case: str) -> int:
  """The share of a case, in percent."""
  return int(case.rsplit("_", 1)[1])


def method_name(case: str) -> str:
  """Name of the method of a case, without prefixes, preset and options."""
  last = COUNTERPARTS[case.rsplit("_", 1)[0]].method.rpartition("/")[2]
  return re.split("[.:]", last)[0]


def plan_of(case: str) -> kvjax.Plan:
  """The plan that keeps what a press keeps."""
  if case == FULL:
    return kvjax.get_plan("full", kvjax.Retention(1.0))
  name, percent = case.rsplit("_", 1)[0], percent_of(case)
  counterpart = COUNTERPARTS[name]
  if counterpart.retention:
    share = kvjax.Retention(1 - percent / 100)
    return kvjax.get_plan(counterpart.method, share)
  golden = f"streaming_{percent}" if name in RENUMBERED else case
  kept = their_kept(stored_prompts()[0])[golden][0]
  return kvjax.get_plan(
    counterpart.method, kvjax.Tokens(int(kept.sum()) // len(kept))
  )


@functools.cache
def sketch() -> np.ndarray:
  """The sketch [K, D, k] that kvpress used."""
  with np.load(GOLDEN / "sketches.npz") as stored:
    return stored["48"]


def sketches_of_kvpress() -> Any:
  """Makes Compactor use it too."""
  return mock.patch(
    "kvjax.methods.leverage_scores.draw_factors",
    return_value=jnp.asarray(sketch()),
  )


class Compressed(NamedTuple):
  """What kvjax makes of prompts.

  Attributes:
    kept: by case and prompt, bool [L, K, n]; not for renumbered tokens.
    answers: by case and prompt.
  """

  kept: dict[str, dict[int, np.ndarray]]
  answers: dict[str, dict[int, list[int]]]


def compress(
  lm: Pretrained,
  chosen: Sequence[str],
  prompts: Sequence[int],
  rows: int = 2,
  answer: bool = True,
) -> Compressed:
  """Prefills prompts, keeps what the cases keep, and answers the questions.

  Args:
    lm: the model.
    chosen: the cases.
    prompts: their numbers.
    rows: prompts per batch.
    answer: whether the questions are asked.
  """
  kept: dict[str, dict[int, np.ndarray]] = {case: {} for case in chosen}
  answers: dict[str, dict[int, list[int]]] = {case: {} for case in chosen}
  decoding = kvjax.Decoding(MOST_TOKENS, lm.text.eos_ids)
  for start in range(0, len(prompts), rows):
    batch = prompts[start : start + rows]
    contexts = [samples()[prompt]["context"] for prompt in batch]
    caches, _ = kvjax.sweep(
      lm.model,
      lm.params,
      kvjax.Prompts.of(contexts, len(contexts[0])),
      [plan_of(case) for case in chosen],
    )
    for case, cache in zip(chosen, caches, strict=True):
      if case.rsplit("_", 1)[0] in RENUMBERED:
        continue
      for row, prompt in enumerate(batch):
        kept[case][prompt] = _kept(cache, row)
    if not answer:
      continue
    questions = [samples()[prompt]["question"] for prompt in batch]
    generated = kvjax.generate(
      lm.model, lm.params, caches, kvjax.Prompts.of(questions), decoding
    )
    for case, found in zip(chosen, generated, strict=True):
      answers[case] |= dict(zip(batch, found.rows(), strict=True))
  return Compressed(kept, answers)


def _kept(cache: kvjax.Cache, row: int) -> np.ndarray:
  """Which tokens of its context a row holds, bool [L, K, n]."""
  length = int(cache.next_positions[row])
  found = []
  for layer in cache.layers:
    assert layer is not None
    heads = layer.row_positions(row)
    bits = np.zeros((len(heads), length), bool)
    for head, positions in zip(bits, heads, strict=True):
      head[positions] = True
    found.append(bits)
  return np.stack(found)


class Difference(NamedTuple):
  """Tokens of a layer that only one of both keeps.

  Attributes:
    layer: number of the layer.
    tokens: how many there are.
    gap: how far apart the scores are that compete with each other, relative to
      the largest of them; those that are standardized, to 1 or more.
    rounding: what float32 explains.
  """

  layer: int
  tokens: int
  gap: float
  rounding: float


class Judge:
  """Scores the tokens that only one of both keeps."""

  def __init__(self, lm: Pretrained) -> None:
    self._params = lm.params
    self._seen: dict[int, Sequence[Any]] = {}

    def attend(layer: int, state: None, activations: Any) -> Any:
      del layer, state
      return attend_to_prompt(activations), activations

    def run(params: Any, tokens: Any, positions: Any) -> Any:
      nothing = [None] * lm.model.geometry.num_layers
      return hidden_states(
        lm.model, params, tokens, positions, nothing, attend
      )[1]

    self._run = jax.jit(run)

  def differences(
    self, case: str, prompt: int, ours: np.ndarray
  ) -> Iterator[Difference]:
    """Yields the layers where kvjax does not keep what kvpress keeps."""
    differs = ours != their_kept(prompt)[case]
    for layer in map(int, np.flatnonzero(differs.any(axis=(1, 2)))):
      activations = self._activations(prompt)[layer]
      scores, groups = scored(case, layer, activations)
      scores, groups = scores[differs[layer]], groups[differs[layer]]
      least = 1.0 if method_name(case) == "compactor" else 0.0
      gaps = []
      for group in np.unique(groups):
        own = scores[groups == group]
        gaps.append(float(np.ptp(own) / max(least, np.abs(own).max())))
      rounding = rounding_of(case, activations)
      yield Difference(layer, len(scores), max(gaps), rounding)

  def _activations(self, prompt: int) -> Sequence[Any]:
    """What the attention of each layer sees of a context."""
    if prompt not in self._seen:
      tokens = np.asarray([samples()[prompt]["context"]], np.int32)
      positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
      self._seen[prompt] = self._run(self._params, tokens, positions)
    return self._seen[prompt]


def scored(
  case: str, layer: int, activations: Any
) -> tuple[np.ndarray, np.ndarray]:
  """A layer's scores [K, n], and numbers of the groups that compete."""
  plan, length = plan_of(case), activations.keys.shape[2]
  evaluation, method = Evaluation.of(plan), plan.method
  found = evaluate_layer(evaluation, np.int32(layer), activations).scores
  if plan.spread.votes:
    scores = np.asarray(found[0])[0]
    return scores, np.zeros(scores.shape, int)
  if method_name(case) == "compactor":
    blend = method.blend
    if method.blend_removed:
      blend = percent_of(case) / 100
    # Of two standardized scores, their weighted mean.
    found = (found.attention + blend * found.outlier) / (1 + blend)
  if method_name(case) == "lagkv":
    partitions = np.asarray(found)[0]
    heads, count, lag = partitions.shape
    scores = np.full((heads, length), np.inf)
    scores[:, method.sinks :][:, : count * lag] = partitions.reshape(heads, -1)
    groups = np.arange(heads)[:, None] * length
    if not method.cross_scoring:
      groups = groups + (np.arange(length) - method.sinks) // lag
    return scores, np.broadcast_to(groups, scores.shape)
  if method_name(case) == "chunkkv":
    found = np.repeat(np.asarray(found), method.chunk, axis=-1)[..., :length]
  scores = np.asarray(found)[0]
  groups = np.arange(len(scores))[:, None]
  return scores, np.broadcast_to(groups, scores.shape)


def rounding_of(case: str, activations: Any) -> float:
  """What float32 explains of the difference of two scores.

  Leverage scores invert the Gram matrix of the sketched keys, which multiplies
  the rounding of its entries by its condition.
  """
  method: Any = plan_of(case).method
  if method_name(case) != "compactor":
    return TIE
  if not method.blend + method.blend_removed:
    return TIE
  keys = np.asarray(activations.keys_unrotated[0], np.float64)
  rows = (keys - keys.mean(axis=1, keepdims=True)) @ sketch()
  values = np.linalg.eigvalsh(np.swapaxes(rows, 1, 2) @ rows)
  condition = (values[:, -1] / values[:, 0]).max()
  return max(TIE, float(np.finfo(np.float32).eps * condition))


class Row(NamedTuple):
  """A row of the table: a press at a share removed.

  Attributes:
    case: the press and the percent.
    equal: layers of stored prompts in which all heads keep the same.
    layers: these layers.
    differences: where they do not.
    scores: by task, the share of needles found by kvpress and by kvjax.
    same_answers: answers that are equal, token by token.
    answers: number of answers.
  """

  case: str
  equal: int
  layers: int
  differences: list[Difference]
  scores: dict[str, tuple[float, float]]
  same_answers: int
  answers: int


def row_of(lm: Pretrained, judge: Judge, case: str, ours: Compressed) -> Row:
  """Compares what both made of all prompts."""
  found: list[Difference] = []
  layers = 0
  for prompt, kept in ours.kept[case].items():
    if case != FULL and prompt in stored_prompts():
      layers += len(kept)
      found += judge.differences(case, prompt, kept)
  scores: dict[str, list[tuple[float, float]]] = {}
  same = 0
  for prompt, answer in ours.answers[case].items():
    sample, other = samples()[prompt], their_answers()[case][prompt]
    same += answer == other
    both = [
      string_match_all(lm.text.decode(ids), sample["answers"])
      for ids in (other, answer)
    ]
    scores.setdefault(sample["task"], []).append((both[0], both[1]))
  means = {
    task: (float(theirs), float(mine))
    for task, pairs in scores.items()
    for theirs, mine in [np.mean(pairs, axis=0)]
  }
  answers = len(ours.answers[case])
  return Row(case, layers - len(found), layers, found, means, same, answers)


def compared(lm: Pretrained) -> list[Row]:
  """Compares all presses on all prompts."""
  chosen, judge = [FULL, *cases()], Judge(lm)
  with sketches_of_kvpress():
    ours = compress(lm, chosen, range(len(samples())))
    return [row_of(lm, judge, case, ours) for case in chosen]


def table(rows: Sequence[Row]) -> str:
  """The table of the page."""
  lines = []
  for row in rows:
    name = row.case.rsplit("_", 1)[0]
    press = "none" if row.case == FULL else f"`{COUNTERPARTS[name].press}`"
    method = "full" if row.case == FULL else COUNTERPARTS[name].method
    kept = f"{row.equal} of {row.layers}" if row.layers else "–"
    scores = [
      f"{100 * theirs:.0f} / {100 * ours:.0f}"
      for theirs, ours in row.scores.values()
    ]
    cells = [
      press,
      f"`{method}`",
      f"{percent_of(row.case) / 100:g}",
      kept,
      *scores,
      f"{row.same_answers} of {row.answers}",
    ]
    lines.append(f"| {' | '.join(cells)} |")
  head = (
    "| press | kvjax | ratio | kept sets equal "
    f"| {' | '.join(rows[0].scores)} | answers equal |"
  )
  rule = "| :-- | :-- | --: | --: | --: | --: | --: |"
  return "\n".join([head, rule, *lines])


def main() -> None:
  rows = compared(load(MODEL))
  for row in rows:
    for difference in row.differences:
      print(row.case, difference)
  text = PAGE.read_text(encoding="utf-8")
  before, _, rest = text.partition("<!-- table -->\n")
  after = rest.partition("<!-- end -->")[2]
  page = f"{before}<!-- table -->\n{table(rows)}\n<!-- end -->{after}"
  PAGE.write_text(page, encoding="utf-8")
  print(table(rows))


if __name__ == "__main__":
  main()
