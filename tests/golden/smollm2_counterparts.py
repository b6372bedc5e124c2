"""The methods of kvjax that equal kvpress's presses, and the stored goldens.

What kvpress keeps and answers on SmolLM2-135M-Instruct is stored in
kvpress_smollm2/, by make_kvpress_smollm2.py.
"""

import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import smollm2_gates as gates

import kvjax
from kvjax.methods.rerotated import Rerotated

MODEL = "smollm2-135m-instruct"
GOLDEN = pathlib.Path(__file__).parent / "kvpress_smollm2"
PERCENTS = (50, 75)
FULL = "full_0"


class Counterpart(NamedTuple):
  """A press and the method of kvjax that equals it.

  Attributes:
    press: as kvpress writes it, with the options that are not its defaults.
    method: as `kvjax.get_plan` reads it. STATISTICS, PATTERN, LINEAR, MLP and
      GATES stand for files and RATIO for the share that is removed.
    budget: the share that is not removed, the number of tokens that the press
      keeps, everything, a threshold in place of a share, or a score.
    by_layer: what a layer of the upper half keeps less than one of the lower
      half, as a share.
    decoding: what then keeps as many tokens while decoding.
  """

  press: str
  method: str
  budget: Literal["share", "tokens", "everything", "threshold", "score"] = (
    "share"
  )
  by_layer: float = 0.0
  decoding: str = ""


COUNTERPARTS = {
  "knorm": Counterpart("KnormPress", "key_norm.kvpress"),
  "keydiff": Counterpart("KeyDiffPress", "keydiff.kvpress"),
  "snapkv": Counterpart("SnapKVPress", "snapkv.kvpress"),
  "tova": Counterpart("TOVAPress", "tova.kvpress"),
  "observed": Counterpart("ObservedAttentionPress", "h2o.kvpress"),
  "expected": Counterpart(
    "ExpectedAttentionPress", "expected_attention.kvpress"
  ),
  "expected_stats": Counterpart(
    "ExpectedAttentionStatsPress",
    "expected_attention.kvpress:statistics=STATISTICS",
  ),
  "q_filters": Counterpart(
    "QFilterPress", "qfilters.kvpress:filters=STATISTICS"
  ),
  "streaming": Counterpart("StreamingLLMPress", "streaming.kvpress"),
  "rerotated": Counterpart(
    "KeyRerotationPress(StreamingLLMPress)", "rerotate/streaming.kvpress"
  ),
  "rerotated_keydiff": Counterpart(
    "KeyRerotationPress(KeyDiffPress)", "rerotate/keydiff.kvpress"
  ),
  "lagkv": Counterpart("LagKVPress", "lagkv.kvpress"),
  "lagkv_cross": Counterpart(
    "LagKVPress, cross_scoring=True", "lagkv.kvpress:cross_scoring=true"
  ),
  "pyramidkv": Counterpart("PyramidKVPress", "pyramidkv.kvpress"),
  "pyramidkv_2": Counterpart(
    "PyramidKVPress, beta=2", "pyramidkv.kvpress:beta=2"
  ),
  "adakv_default": Counterpart("AdaKVPress(SnapKVPress)", "adakv.kvpress"),
  "adakv_keydiff_default": Counterpart(
    "AdaKVPress(KeyDiffPress)", "ada.kvpress/keydiff.kvpress"
  ),
  "adakv": Counterpart(
    "AdaKVPress(SnapKVPress), alpha_safeguard=0", "ada/snapkv.kvpress:alpha=0"
  ),
  "adakv_keydiff": Counterpart(
    "AdaKVPress(KeyDiffPress), alpha_safeguard=0", "ada/keydiff:alpha=0"
  ),
  "adakv_expected": Counterpart(
    "AdaKVPress(ExpectedAttentionPress, epsilon=0.01)",
    "ada.kvpress/expected_attention.kvpress:epsilon=0.01",
  ),
  "critical": Counterpart("CriticalKVPress(SnapKVPress)", "criticalkv.kvpress"),
  "critical_ada": Counterpart(
    "CriticalAdaKVPress(SnapKVPress)", "criticaladakv.kvpress"
  ),
  "critical_expected": Counterpart(
    "CriticalKVPress(ExpectedAttentionPress, use_vnorm=False)",
    "critical/expected_attention.kvpress:value_norm=false",
  ),
  "critical_ada_expected": Counterpart(
    "CriticalAdaKVPress(ExpectedAttentionPress, use_vnorm=False)",
    "ada.kvpress/critical/expected_attention.kvpress:value_norm=false",
  ),
  "chunkkv_default": Counterpart(
    "ChunkKVPress(SnapKVPress)", "chunkkv.kvpress"
  ),
  "chunkkv_keydiff": Counterpart(
    "ChunkKVPress(KeyDiffPress)", "chunkkv.kvpress/keydiff.kvpress"
  ),
  "chunkkv": Counterpart(
    "ChunkKVPress(SnapKVPress, window_size=36, kernel_size=1), chunk_length=20",
    "chunkkv:window=36:chunk=20",
    budget="tokens",
  ),
  "chunk": Counterpart(
    "ChunkPress(KeyDiffPress), chunk_length=256",
    "chunked:length=256/keydiff.kvpress",
  ),
  "block": Counterpart("BlockPress(KnormPress)", "key_norm.kvpress"),
  "by_layer": Counterpart(
    "PerLayerCompressionPress(SnapKVPress)", "snapkv.kvpress", by_layer=0.3
  ),
  "cur": Counterpart("CURPress", "cur.kvpress"),
  "leverage": Counterpart("LeverageScorePress", "leverage.kvpress"),
  "noncausal": Counterpart(
    "NonCausalAttnPress, chunk_size=259", "noncausal.kvpress:chunk=259"
  ),
  "compactor": Counterpart("CompactorPress", "compactor.kvpress"),
  "finch": Counterpart("FinchPress", "finch.kvpress"),
  "duo": Counterpart(
    "DuoAttentionPress", "duoattention:pattern=PATTERN:share=RATIO"
  ),
  "kvzip": Counterpart("KVzipPress", "kvzip.kvpress"),
  "kvzip_plus": Counterpart(
    "KVzipPress, kvzip_plus_normalization=True", "kvzip.kvpress_plus"
  ),
  "kvzip_layer": Counterpart(
    "KVzipPress, layerwise=True", "kvzip.kvpress:level=layer"
  ),
  "kvgrad": Counterpart("KVgradPress", "kvzip.kvpress_grad"),
  "simlayer": Counterpart(
    "SimLayerKVPress, n_recent=256", "simlayerkv:recent=256", budget="threshold"
  ),
  "think": Counterpart(
    "ThinKPress", "think:share=RATIO/full", budget="everything"
  ),
  "think_snapkv": Counterpart(
    "ComposedPress([SnapKVPress, ThinKPress(0.5)])", "think/snapkv.kvpress"
  ),
  "think_keydiff": Counterpart(
    "ComposedPress([KeyDiffPress, ThinKPress(0.5)])", "think/keydiff.kvpress"
  ),
  "kvzap_linear": Counterpart(
    'KVzapPress, model_type="linear"', "kvzap.kvpress:gate=LINEAR"
  ),
  "kvzap": Counterpart("KVzapPress", "kvzap.kvpress:gate=MLP"),
  "dms": Counterpart(
    "DMSPress(KVzapPress)", "kvzap.kvpress:gate=MLP", budget="score"
  ),
  "fast_kvzip": Counterpart("FastKVzipPress", "fast_kvzip.kvpress:gate=GATES"),
  "fast_kvzip_layer": Counterpart(
    "FastKVzipPress, layerwise=True",
    "fast_kvzip.kvpress:gate=GATES:level=layer",
  ),
  "prefill_decoding": Counterpart(
    "PrefillDecodingPress(SnapKVPress, DecodingPress(KeyDiffPress))",
    "snapkv.kvpress",
    decoding="keydiff.kvpress",
  ),
}


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
  """What kvpress keeps of a prompt, by case: bool [L, K, n].

  If it drops channels, these stand before the tokens, [L, K, D + n]. Of a press
  that only drops channels, tokens are not stored: all of them are kept.
  """
  length = len(samples()[prompt]["context"])
  with np.load(GOLDEN / f"kept_{prompt}.npz") as stored:
    return {case: _unpacked(bits, length) for case, bits in stored.items()}


def _unpacked(bits: np.ndarray, length: int) -> np.ndarray:
  """The kept channels and tokens of stored bits."""
  kept = np.unpackbits(bits, axis=-1).astype(bool)
  if kept.shape[-1] < length:
    # Channels, which are whole bytes, without the tokens: all are kept.
    tokens = np.ones((*kept.shape[:2], length), bool)
    return np.concatenate([kept, tokens], axis=-1)
  return kept[..., : kept.shape[-1] - (-length % 8)]


def stored_prompts() -> list[int]:
  """The prompts whose kept tokens are stored."""
  return sorted(int(path.stem.split("_")[1]) for path in GOLDEN.glob("kept_*"))


def cases(names: Sequence[str] = tuple(COUNTERPARTS)) -> list[str]:
  """Presses with the share that they remove, in percent."""
  return [f"{name}_{percent}" for name in names for percent in PERCENTS]


def percent_of(case: str) -> int:
  """The share of a case, in percent."""
  return int(case.rsplit("_", 1)[1])


def plan_of(case: str) -> kvjax.Plan:
  """The plan that keeps what a press keeps."""
  if case == FULL:
    return kvjax.get_plan("full", kvjax.Retention(1.0))
  counterpart = COUNTERPARTS[case.rsplit("_", 1)[0]]
  ratio = percent_of(case) / 100
  name = counterpart.method.replace("RATIO", str(ratio))
  name = name.replace("STATISTICS", str(_files() / "statistics.safetensors"))
  name = name.replace("PATTERN", str(_files() / "full_attention_heads.tsv"))
  name = name.replace("LINEAR", str(gates.KVZAP["linear"]))
  name = name.replace("MLP", str(gates.KVZAP["mlp"]))
  name = name.replace("GATES", str(_files() / "fast_kvzip.pt"))
  if counterpart.budget == "everything":
    return kvjax.get_plan(name, kvjax.Retention(1.0))
  if counterpart.budget == "threshold":
    return kvjax.get_plan(name, kvjax.Threshold(1 - ratio, window=1))
  if counterpart.budget == "score":
    return kvjax.get_plan(name, kvjax.Threshold(gates.THRESHOLDS[ratio]))
  if counterpart.budget == "tokens":
    kept = their_kept(stored_prompts()[0])[case][0]
    count = int(kept.sum()) // len(kept)
    return kvjax.get_plan(name, kvjax.Tokens(count))
  if counterpart.by_layer:
    half = counterpart.by_layer / 2
    lower = kvjax.Retention(1 - (ratio - half))
    upper = kvjax.Retention(1 - (ratio + half))
    layers = len(statistics()["q_filters"])
    budgets = [lower] * (layers // 2) + [upper] * (layers // 2)
    return kvjax.get_plan(name, kvjax.PerLayer(budgets))
  share = kvjax.Retention(1 - ratio)
  if counterpart.decoding:
    count = share.num_kept(len(samples()[0]["context"]))
    every = kvjax.Schedule(every=1)
    later = kvjax.get_plan(
      counterpart.decoding, kvjax.Tokens(count), schedule=every
    )
    return kvjax.get_plan(name, share, decoding=later)
  return kvjax.get_plan(name, share)


def in_place(plan: kvjax.Plan) -> kvjax.Plan:
  """The plan that keeps the same tokens at their own positions."""
  method = plan.method
  if not isinstance(method, Rerotated):
    return plan
  return dataclasses.replace(plan, method=method.over)


@functools.cache
def statistics() -> dict[str, np.ndarray]:
  """What methods read from files."""
  with np.load(GOLDEN / "statistics.npz") as stored:
    return dict(stored)


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
  return tempfile.TemporaryDirectory()


@functools.cache
def _files() -> pathlib.Path:
  """A folder with the files that methods read."""
  folder, stored = pathlib.Path(_folder().name), statistics()
  variances = stored["query_var"]
  arrays = {
    "query_mean": stored["query_mean"],
    "query_cov": variances[..., None] * np.eye(variances.shape[-1], dtype="f4"),
    "q_filters": stored["q_filters"],
  }
  safetensors.numpy.save_file(arrays, folder / "statistics.safetensors")
  np.savetxt(
    folder / "full_attention_heads.tsv",
    stored["full_attention_heads"],
    delimiter="\t",
  )
  (folder / "fast_kvzip.pt").write_bytes(gates.fast_kvzip_file())
  return folder


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
