"""Whether rounding explains where kvjax does not keep what kvpress keeps.

Both compute in float32 and add in another order. Tokens may be exchanged if the
scores by which they compete agree but for that.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import smollm2_counterparts as goldens

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.engine import deferred
from kvjax.engine.compress import Evaluation, evaluate_layer
from kvjax.engine.forward import attend_to_prompt, hidden_states
from kvjax.methods import (
  Chunked,
  Compactor,
  LagKV,
  LeverageScores,
  SimLayer,
  StreamingLLM,
  Think,
  WholeChunks,
)
from kvjax.methods.gated import GatedMethod
from kvjax.methods.kvzip import KVzip, Level
from kvjax.models.pretrained import Pretrained

# Scores that differ by less, relative to their size, are equal but for the
# order of float32 sums.
TIE = 1e-4


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
    self._lm = lm
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
    differs = ours != goldens.their_kept(prompt)[case]
    layers = list(map(int, np.flatnonzero(differs.any(axis=(1, 2)))))
    plan = goldens.in_place(goldens.plan_of(case))
    if isinstance(plan.method, GatedMethod):
      yield from self._of_gates(plan, prompt, differs)
      return
    if layers and isinstance(plan.method, KVzip):
      scores = self._replayed(plan, prompt)
      for layer in layers:
        gap = _gap_of_level(plan.method.level, scores, differs, layer)
        yield Difference(layer, int(differs[layer].sum()), gap, TIE)
      return
    if isinstance(plan.method, StreamingLLM | SimLayer | Think):
      # Without scores, no tokens tie. Channels may not differ, and no tie is
      # allowed for what ThinK wraps.
      for layer in layers:
        yield Difference(layer, int(differs[layer].sum()), np.inf, 0.0)
      return
    for layer in layers:
      activations = self._activations(prompt)[layer]
      if plan.spread.votes and plan.method.votes is not plan.method:
        theirs = goldens.their_kept(prompt)[case][layer]
        gap = _gap_of_counts(plan, layer, activations, ours[layer], theirs)
        yield Difference(layer, int(differs[layer].sum()), gap, TIE)
        continue
      scores, groups = scored(plan, case, layer, activations)
      scores, groups = scores[differs[layer]], groups[differs[layer]]
      # Standardized scores are 1 or so, also where they are next to 0.
      least = 1.0 if isinstance(plan.method, Compactor) else 0.0
      gap = max(_gap(scores[groups == n], least) for n in np.unique(groups))
      rounding = rounding_of(plan, activations)
      yield Difference(layer, len(scores), gap, rounding)

  def _of_gates(
    self, plan: kvjax.Plan, prompt: int, differs: np.ndarray
  ) -> Iterator[Difference]:
    """Yields the layers that differ by the scores of gates."""
    layers = list(map(int, np.flatnonzero(differs.any(axis=(1, 2)))))
    if not layers:
      return
    scores = self._predicted(plan.method, prompt)
    for layer in layers:
      own = scores[layer][differs[layer]]
      if isinstance(plan.budget, kvjax.Threshold):
        gap = _gap(np.append(own, plan.budget.least), 0.0)
      else:
        gap = _gap_of_level(plan.method.level, scores, differs, layer)
      yield Difference(layer, len(own), gap, TIE)

  def _predicted(self, method: GatedMethod, prompt: int) -> np.ndarray:
    """What gates predict for all layers, [L, K, n]."""
    found = [
      method.scores(jnp.int32(layer), LayerCache.of(each), each)[0]
      for layer, each in enumerate(self._activations(prompt))
    ]
    return np.stack(found)

  def _activations(self, prompt: int) -> Sequence[Any]:
    """What the attention of each layer sees of a context."""
    if prompt not in self._seen:
      tokens = np.asarray([goldens.samples()[prompt]["context"]], np.int32)
      positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
      self._seen[prompt] = self._run(self._lm.params, tokens, positions)
    return self._seen[prompt]

  def _replayed(self, plan: kvjax.Plan, prompt: int) -> np.ndarray:
    """The scores of all layers after a replay, [L, K, n]."""
    found: dict[int, Any] = {}
    replay = deferred.replay_prompts

    def listen(*args: Any) -> Mapping[int, Any]:
      found.update(replay(*args))
      return found

    context = goldens.samples()[prompt]["context"]
    prompts = kvjax.Prompts.of(
      [context], repeat_request=kvjax.RepeatRequest.of(self._lm.text)
    )
    with mock.patch.object(deferred, "replay_prompts", listen):
      kvjax.prefill(self._lm.model, self._lm.params, prompts, plan)
    asked = plan.method.traits.replay
    scores = np.stack([np.asarray(found[n][asked][0]) for n in sorted(found)])
    kv_heads = self._lm.model.geometry.layers[0].kv_heads
    scores = scores.reshape(len(scores), kv_heads, -1, scores.shape[-1])
    # The template is not scored.
    return np.maximum(scores.max(axis=2), 0.0)[..., : len(context)]


def _gap(scores: np.ndarray, least: float) -> float:
  """How far apart scores are, relative to the largest or to `least`."""
  return float(np.ptp(scores) / max(least, np.abs(scores).max()))


def _gap_of_level(
  level: Level, scores: np.ndarray, differs: np.ndarray, layer: int
) -> float:
  """How far apart the scores are by which heads compete.

  Args:
    level: heads that share a budget.
    scores: those of all layers, [L, K, n].
    differs: tokens that only one of both keeps, bool [L, K, n].
    layer: number of the layer, in which tokens differ.
  """
  if level == "model":
    return _gap(scores[differs], 0.0)
  if level == "layer":
    return _gap(scores[layer][differs[layer]], 0.0)
  heads = zip(scores[layer], differs[layer], strict=True)
  return max(_gap(own[there], 0.0) for own, there in heads if there.any())


def _gap_of_counts(
  plan: kvjax.Plan,
  layer: int,
  activations: Any,
  ours: np.ndarray,
  theirs: np.ndarray,
) -> float:
  """How far apart the votes are by which heads keep more or fewer tokens.

  A head with another budget keeps the first or the last tokens of another
  order, which do not tie. The votes tie that are its own with one budget only.

  Args:
    plan: a plan whose heads compete by votes, and then choose by other scores.
    layer: number of the layer.
    activations: what its attention sees.
    ours: what kvjax keeps, bool [K, n].
    theirs: what kvpress keeps.
  """
  found = evaluate_layer(
    Evaluation.of(plan), jnp.int32(layer), activations
  ).scores
  window = plan.method.traits.protects
  votes = np.sort(np.asarray(found[0])[0][:, : ours.shape[1] - window])[:, ::-1]
  tied = []
  for head, one, other in zip(votes, ours, theirs, strict=True):
    if np.any(one & ~other) and np.any(other & ~one):
      return np.inf
    fewer, more = sorted((one.sum() - window, other.sum() - window))
    tied.append(head[fewer:more])
  return _gap(np.concatenate(tied), 0.0)


def scored(
  plan: kvjax.Plan, case: str, layer: int, activations: Any
) -> tuple[np.ndarray, np.ndarray]:
  """A layer's scores [K, n], and numbers of the groups that compete."""
  method: Any = plan.method
  length = activations.keys.shape[2]
  found = evaluate_layer(
    Evaluation.of(plan), jnp.int32(layer), activations
  ).scores
  cache = LayerCache.of(activations)
  by_head = np.arange(cache.positions.shape[1])[:, None] * length
  if plan.spread.votes:
    scores = np.asarray(found[0])[0]
    return scores, np.zeros(scores.shape, int)
  if isinstance(method, Compactor):
    blend = method.blend
    if method.blend_removed:
      blend = goldens.percent_of(case) / 100
    # Of two standardized scores, their weighted mean.
    scores = ((found.attention + blend * found.outlier) / (1 + blend))[0]
  elif isinstance(method, Chunked):
    scores = np.concatenate(np.asarray(found), axis=-1)[..., :length]
    by_head = by_head + np.arange(length) // method.length
  elif isinstance(method, WholeChunks):
    scores = _chunk_means(np.asarray(found)[0], method.chunk)
  else:
    scores = method.token_scores(found, cache)[0]
  if isinstance(method, LagKV) and not method.cross_scoring:
    by_head = by_head + (np.arange(length) - method.sinks) // method.lag
  scores = np.asarray(scores)
  return scores, np.broadcast_to(by_head, scores.shape)


def _chunk_means(scores: np.ndarray, chunk: int) -> np.ndarray:
  """The mean of each token's chunk over all heads, [K, n]."""
  total, starts = scores.sum(axis=0), np.arange(0, scores.shape[1], chunk)
  sizes = np.diff([*starts, len(total)])
  means = np.repeat(np.add.reduceat(total, starts) / sizes, sizes)
  return np.broadcast_to(means, scores.shape)


def rounding_of(plan: kvjax.Plan, activations: Any) -> float:
  """What float32 explains of the difference of two scores.

  Leverage scores invert the Gram matrix of the sketched keys, which multiplies
  the rounding of its entries by its condition.
  """
  method: Any = plan.method
  leverage = isinstance(method, LeverageScores)
  if not leverage and not isinstance(method, Compactor):
    return TIE
  keys = np.asarray(activations.keys_unrotated[0], np.float64)
  sketch = goldens.sketch()
  rows = (keys - keys.mean(axis=1, keepdims=True)) @ sketch
  values = np.linalg.eigvalsh(np.swapaxes(rows, 1, 2) @ rows)
  condition = (values[:, -1] / values[:, 0]).max()
  return max(TIE, float(np.finfo(np.float32).eps * condition))
