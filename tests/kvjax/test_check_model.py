"""The contract of models finds what it is to find, and says it."""

import contextlib
import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.models.pretrained import load
from kvjax.testing import TinyModel, check_model

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
LOCAL = kvjax.LayerSpec(4, 2, 8, window=6)
MLP = kvjax.LayerSpec(1, 1, 1, cache=False, weights=1)
SINKS = kvjax.LayerSpec(4, 2, 8, sinks=True, softcap=5.0, weights=2)
HYBRID = kvjax.Geometry((LOCAL, MLP, SINKS), 64)


class Changed(TinyModel):
  """A model that passes other activations on."""

  def changed(self, activations):
    return activations

  def block(self, *arguments):
    *others, attend = arguments
    return super().block(*others, lambda seen: attend(self.changed(seen)))


class ForgetsPositions(TinyModel):
  """It counts the tokens of each block, as a prompt's positions would."""

  def block(self, weights, spec, hidden, shared, positions, attend):
    places = jnp.broadcast_to(jnp.arange(hidden.shape[1]), positions.shape)

    def attend_there(seen):
      return attend(dataclasses.replace(seen, positions=positions))

    return super().block(weights, spec, hidden, shared, places, attend_there)


class LooksAhead(TinyModel):
  def normalize(self, params, hidden):
    return hidden + jnp.roll(hidden, -1, axis=1)


class SeesOtherRows(TinyModel):
  def normalize(self, params, hidden):
    return hidden - hidden.mean(0, keepdims=True)


class CountsPadding(TinyModel):
  def normalize(self, params, hidden):
    return hidden * hidden.shape[1]


class HalfLogits(TinyModel):
  def logits(self, params, hidden):
    return super().logits(params, hidden).astype(jnp.bfloat16)


class LogitsOfNothing(TinyModel):
  def logits(self, params, hidden):
    return super().logits(params, hidden) * jnp.nan


class AlwaysTheSame(TinyModel):
  def logits(self, params, hidden):
    return jnp.ones_like(super().logits(params, hidden))


class RotatesBack(TinyModel):
  def rerotate(self, keys, by, spec):
    return super().rerotate(keys, -by, spec)


class RotatedTwice(Changed):
  def changed(self, activations):
    return dataclasses.replace(activations, keys_unrotated=activations.keys)


class BeforeTheKeyNorm(Changed):
  def changed(self, activations):
    scale = 1 + jnp.abs(activations.values[..., :1])
    keys = activations.keys_unrotated * scale
    return dataclasses.replace(activations, keys_unrotated=keys)


class ValuesAsKeys(Changed):
  def changed(self, activations):
    return dataclasses.replace(activations, keys_unrotated=activations.values)


class NegatesKeys(Changed):
  def changed(self, activations):
    keys = -activations.keys_unrotated
    return dataclasses.replace(activations, keys_unrotated=keys)


class ScalesChannels(Changed):
  def changed(self, activations):
    scale = jnp.linspace(0.5, 2.0, 8)[None, None, None]
    return dataclasses.replace(
      activations,
      keys_unrotated=activations.keys_unrotated / scale,
      queries_unrotated=activations.queries_unrotated * scale,
    )


class WrongInOneLayer(TinyModel):
  """Its layer with sinks passes its queries on as those before rotation."""

  def block(self, *arguments):
    *others, attend = arguments

    def attend_there(seen):
      if seen.sinks is not None:
        seen = dataclasses.replace(seen, queries_unrotated=seen.queries)
      return attend(seen)

    return super().block(*others, attend_there)


class QueriesOfOthers(Changed):
  def changed(self, activations):
    queries = activations.queries_unrotated[:, :1]
    return dataclasses.replace(activations, queries_unrotated=queries)


class ProjectsInputs(Changed):
  def changed(self, activations):
    projection = activations.output_projection.swapaxes(0, 1)
    return dataclasses.replace(activations, output_projection=projection)


class InputsByHead(Changed):
  def changed(self, activations):
    inputs = activations.inputs.swapaxes(0, 1)
    return dataclasses.replace(activations, inputs=inputs)


class MixedPrecision(TinyModel):
  """It computes in bfloat16, with weights in float32."""

  def embed(self, params, tokens, positions):
    hidden, shared = super().embed(params, tokens, positions)
    return hidden.astype(jnp.bfloat16), shared

  def block(self, weights, *arguments):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    return super().block(narrow, *arguments)

  def normalize(self, params, hidden):
    return super().normalize(params, hidden.astype(jnp.float32))


class Breaks(TinyModel):
  def normalize(self, params, hidden):
    return hidden + jnp.ones(7)


@pytest.mark.parametrize(
  ("kind", "said"),
  [
    (ForgetsPositions, "must give a token after a cached prompt the logits"),
    (LooksAhead, "must not depend on later ones"),
    (SeesOtherRows, "for a row must not depend on other rows"),
    (CountsPadding, "must not depend on padding"),
    (HalfLogits, r"must be float32.*they are bfloat16 of shape \(3, 48, 64\)"),
    (LogitsOfNothing, "must be finite"),
    (AlwaysTheSame, "gives all tokens the same logits"),
    (RotatesBack, r"rerotate of .* positions p to those at p \+ by"),
    (RotatedTwice, "keys_unrotated of .* before they are rotated"),
    (BeforeTheKeyNorm, "keys_unrotated of .* before they are rotated"),
    (NegatesKeys, "keys_unrotated of .* before they are rotated"),
    (ValuesAsKeys, "keys_unrotated of .* before they are rotated"),
    (Breaks, r"fails to read a prompt: \w+Error, .*broadcast"),
  ],
)
def test_a_model_that_breaks_the_contract_is_refused(kind, said):
  model = kind()
  with pytest.raises(kvjax.InputError, match=said):
    check_model(model, model.init())


def test_every_layer_is_checked():
  model = WrongInOneLayer(HYBRID)
  with pytest.raises(kvjax.InputError, match="queries_unrotated of Wrong"):
    check_model(model, model.init())


def test_channels_may_be_scaled():
  model = ScalesChannels()
  check_model(model, model.init())


def test_mixed_precision_is_rounded_as_its_activations():
  model = MixedPrecision()
  check_model(model, model.init())


def test_what_is_no_model_or_too_short_is_refused():
  with pytest.raises(kvjax.InputError, match=r"The model is a kvjax\.Model"):
    check_model(TinyModel, None)
  short = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, max_positions=31))
  with pytest.raises(kvjax.InputError, match=r"32 tokens .* it has 31\."):
    check_model(short, short.init())


@pytest.mark.slow
def test_wrong_shapes_are_refused():
  """In a process of its own, since annotations are checked here."""
  cases = [
    (QueriesOfOthers, "queries_unrotated of QueriesOfOthers"),
    (ProjectsInputs, "with (4, 8) first; it is (8, 4, 32)"),
    (InputsByHead, "must be [B, S, E]; they are (48, 3, 32)"),
  ]
  for kind, said in cases:
    source = (
      f"from {__name__} import *; model = {kind.__name__}(); "
      "check_model(model, model.init())"
    )
    result = subprocess.run(
      [sys.executable, "-c", source],
      check=False,
      capture_output=True,
      text=True,
      cwd=pathlib.Path(__file__).parent,
    )
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("kvjax.errors.InputError")
    assert said in last


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hybrid_passes(dtype):
  model = TinyModel(HYBRID, dtype=dtype)
  check_model(model, model.init())


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(p.stem for p in GOLDEN.glob("*.npz")))
def test_families_pass(family):
  lm = load(GOLDEN / family, dtype="float32")
  # It turns keys by angles that depend on the prompt's length.
  by_length = family == "llama_dynamic"
  with (
    pytest.raises(kvjax.InputError, match="after a cached prompt")
    if by_length
    else contextlib.nullcontext()
  ):
    check_model(lm.model, lm.params)
