"""Schedules evict while decoding what kvpress's DecodingPress evicts.

On random checkpoints, which are built here as they were for kvpress, and on
SmolLM2-135M-Instruct. Prompts of 61 and 90 tokens are padded in one batch;
kvpress ran each of them alone, and compressed to 61 tokens after every 16. The
tokens of the answers are given. In the first layer, equal tokens have equal
norms: they may be exchanged.
"""

import functools
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from fetching import located

import kvjax
from kvjax.engine import decode
from kvjax.models.pretrained import load
from kvjax.testing import kept_positions

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
sys.path.append(str(GOLDEN))
import tiny_llama  # noqa: E402
from decoding_prompts import (  # noqa: E402
  INTERVAL,
  LENGTHS,
  REMOVED,
  SMOLLM2,
  STEPS,
  TARGET,
  answer_to,
  prompt_of,
)

FOLDER = GOLDEN / "kvpress_decoding"
# Programs are compiled for a `top_k`: with one of their own, no other test runs
# those with given tokens.
GIVEN = kvjax.Sampling(temperature=1.0, top_k=8642)
_SNAPKV = "window=12:kernel=3"
_LAGKV = "lagkv.kvpress:sinks=4:lag=8"
# By the name of the press in make_kvpress_decoding.py.
COUNTERPARTS = {
  "tova": "tova.kvpress",
  "keydiff": "keydiff.kvpress",
  "knorm": "key_norm.kvpress",
  "ordered_snapkv": f"snapkv.kvpress_decoding:{_SNAPKV}",
  "ordered_mended_snapkv": f"snapkv.kvpress:{_SNAPKV}",
  "ordered_streaming": "streaming.kvpress",
  "ordered_lagkv": _LAGKV,
  "ordered_lagkv_cross": f"{_LAGKV}:cross_scoring=true",
  "snapkv_then_keydiff": "keydiff.kvpress",
}
# What compresses the prompt, of each PrefillDecodingPress.
BEFORE = {"snapkv_then_keydiff": f"snapkv.kvpress:{_SNAPKV}"}
# Where kvpress's order of kept tokens matters from the second compression on.
UNORDERED = ("snapkv", "streaming", "lagkv", "lagkv_cross")
# What ties after 90 tokens: norms of equal tokens, and ranks.
TIED = ("knorm", "ordered_lagkv")
QUICK = {"ordered_snapkv"}
CHECKPOINTS = (*tiny_llama.SHAPES, SMOLLM2)


def golden(name):
  return np.load(FOLDER / f"{name}.npz")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  @functools.cache
  def loaded(name):
    if name == SMOLLM2:
      return load(located(name), dtype="float32")
    folder = tmp_path_factory.mktemp(name)
    tiny_llama.write(name, folder)
    return load(folder, dtype="float32")

  return loaded


def assert_same(ours, theirs, ids, case):
  """Equal, but for equal tokens in the first layer."""
  assert ours[1:] == theirs[1:], case
  ids = np.array(ids)
  for mine, other in zip(ours[0], theirs[0], strict=True):
    left, right = {*mine} - {*other}, {*other} - {*mine}
    assert sorted(ids[[*left]]) == sorted(ids[[*right]]), case


@pytest.mark.parametrize(
  ("press", "name"),
  [
    pytest.param(
      press,
      name,
      marks=() if press in QUICK and name == "held_out" else pytest.mark.slow,
    )
    for press in COUNTERPARTS
    for name in CHECKPOINTS
  ],
)
def test_schedules_keep_what_kvpress_keeps(
  press, name, checkpoint, monkeypatch
):
  lm = checkpoint(name)
  lengths = LENGTHS[:1] if press in TIED else LENGTHS
  rows = [prompt_of(name, n) for n in lengths]
  answers = [answer_to(name, n) for n in lengths]

  def given(logits, sampling, seeds, positions):
    del logits, seeds
    assert sampling.top_k == GIVEN.top_k
    steps = positions - jnp.asarray(lengths)
    # The one after the last is drawn, too, and not used.
    steps = jnp.minimum(steps, STEPS - 1)[:, None]
    return jnp.take_along_axis(jnp.asarray(answers), steps, axis=1)[:, 0]

  monkeypatch.setattr(decode, "sample", given)
  schedule = kvjax.Schedule(every=INTERVAL)
  later = kvjax.get_plan(
    COUNTERPARTS[press], kvjax.Tokens(TARGET), schedule=schedule
  )
  plan = kvjax.get_plan("full", kvjax.Retention(1.0), decoding=later)
  if press in BEFORE:
    share = kvjax.Retention(1 - REMOVED)
    plan = kvjax.get_plan(BEFORE[press], share, decoding=later)
  raw = press.removeprefix("ordered_")
  # Rows where a tie fell otherwise: what is evicted later saw another cache.
  tied = set()
  with golden(name) as stored:
    for steps in (INTERVAL, STEPS):
      cache, logits = kvjax.prefill(
        lm.model, lm.params, kvjax.Prompts.of(rows), plan
      )
      for row, length in enumerate(lengths if press in BEFORE else ()):
        case = f"{press}/{length}/0"
        ours = kept_positions(cache, row)
        assert_same(ours, stored[case].tolist(), rows[row], case)
      after = kvjax.generate(
        lm.model,
        lm.params,
        kvjax.reserve(cache, 64),
        logits,
        kvjax.Decoding(steps, sampling=GIVEN),
        keep=True,
      )
      for row, length in enumerate(lengths):
        tokens = answers[row][:steps]
        assert after.rows()[row] == tokens
        if row in tied:
          continue
        ours = kept_positions(after.cache, row)
        ids = [*rows[row], *tokens]
        compared = [press]
        if steps == INTERVAL and raw in UNORDERED:
          # Nothing has been out of order before the first.
          compared.append(raw)
        for each in compared:
          case = f"{each}/{length}/{steps}"
          assert_same(ours, stored[case].tolist(), ids, case)
          # Only norms of keys are equal where tokens are.
          if press in TIED and ours != stored[case].tolist():
            tied.add(row)


def test_every_golden_is_compared():
  for name in CHECKPOINTS:
    with golden(name) as stored:
      presses = {case.split("/")[0] for case in stored.files}
    assert presses == {*COUNTERPARTS, *UNORDERED}


def test_each_position_of_queries_keeps_other_tokens():
  """Else the two presets could not be told apart."""
  with golden("held_out") as stored:
    last, own = (
      stored[f"{press}/90/16"]
      for press in ("ordered_snapkv", "ordered_mended_snapkv")
    )
  assert (last != own).any()
