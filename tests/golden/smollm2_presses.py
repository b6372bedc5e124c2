"""The presses of make_kvpress_smollm2.py, and the numbers that they read.

ChunkKVPress scores with SnapKV without pooling and with a window of 36 tokens,
which is its last two chunks, but for `chunkkv_default`. FinchPress takes the
last 32 tokens of the context for the question, and reads no delimiter.
QFilterPress, ExpectedAttentionStatsPress and DuoAttentionPress read
statistics.npz; the covariances have its variances on their diagonals, and 0
elsewhere. KVzapPress and FastKVzipPress have the gates of smollm2_gates.py.
PrefillDecodingPress evicts as many tokens as come, after the question and after
every token of the answer.
"""

import contextlib
import pathlib
import sys
from unittest import mock

import kvpress
import numpy as np
import torch
from kvpress.presses import fastkvzip_press, kvzap_press

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
import smollm2_gates as gates  # noqa: E402

STORED = HERE / "kvpress_smollm2"
LENGTH = 1036
SKETCH_DIM = 48
HEADS, DIM = 3, 64
QUESTION = 32
# Tokens that streaming heads keep at both ends, as the authors' patterns say.
SINK, RECENT = 128, 256


def snapkv_in_chunks(compression_ratio: float):
  press = kvpress.SnapKVPress(compression_ratio, window_size=36, kernel_size=1)
  return kvpress.ChunkKVPress(press, chunk_length=20)


def finch(compression_ratio: float, **options):
  press = kvpress.FinchPress(compression_ratio, **options)
  press.window_size, press.delimiter_token_id = QUESTION, -1
  return press


def by_layer(compression_ratio: float):
  """Half of the layers keep more; the least is more than SnapKV's window."""
  ratios = [compression_ratio - 0.15] * 15 + [compression_ratio + 0.15] * 15
  return kvpress.PerLayerCompressionPress(kvpress.SnapKVPress(), ratios)


def statistics() -> dict[str, np.ndarray]:
  with np.load(STORED / "statistics.npz") as stored:
    return dict(stored)


def with_statistics(compression_ratio: float):
  press = kvpress.ExpectedAttentionStatsPress(compression_ratio)
  press.mu = torch.from_numpy(statistics()["query_mean"])
  press.cov = torch.diag_embed(torch.from_numpy(statistics()["query_var"]))
  return press


def q_filters(compression_ratio: float):
  press = kvpress.QFilterPress(compression_ratio)
  press.q_filters = torch.from_numpy(statistics()["q_filters"])
  # It would load those of the model's name.
  press.post_init_from_model = lambda model: None
  return press


def kvzap(compression_ratio: float, kind: str = "mlp"):
  press = kvpress.KVzapPress(compression_ratio, model_type=kind)
  load = kvzap_press.KVzapModel.from_pretrained
  press.kvzap_model = load(gates.KVZAP[kind])
  # It would load those of the model's name.
  press.post_init_from_model = lambda model: None
  return press


def dms(compression_ratio: float):
  threshold = gates.THRESHOLDS[compression_ratio]
  return kvpress.DMSPress(kvzap(0.0), threshold=threshold)


def fast_kvzip(compression_ratio: float, **options):
  press = kvpress.FastKVzipPress(compression_ratio, **options)
  press.gates = []
  for layer, weights in enumerate(gates.fast_kvzip_layers()):
    heads, _, group = weights["b"].shape
    gate = fastkvzip_press.FastKVzipGate(
      layer, gates.WIDTH, heads, group, torch.float32
    )
    gate.load_state_dict(
      {name: torch.from_numpy(array) for name, array in weights.items()}
    )
    press.gates.append(gate)
  return press


def with_half_of_channels(press):
  return kvpress.ComposedPress([press, kvpress.ThinKPress(0.5)])


def prefill_decoding(compression_ratio: float):
  decoding = kvpress.DecodingPress(
    kvpress.KeyDiffPress(),
    compression_interval=1,
    target_size=round((1 - compression_ratio) * LENGTH),
  )
  prefilling = kvpress.SnapKVPress(compression_ratio)
  return kvpress.PrefillDecodingPress(prefilling, decoding)


# By name, from the share removed to the press; of SimLayerKVPress it is the
# threshold, of DMSPress it stands for one, and of ThinKPress alone it is the
# share of channels.
PRESSES = {
  "knorm": kvpress.KnormPress,
  "keydiff": kvpress.KeyDiffPress,
  "snapkv": kvpress.SnapKVPress,
  "tova": kvpress.TOVAPress,
  "observed": kvpress.ObservedAttentionPress,
  "streaming": kvpress.StreamingLLMPress,
  "rerotated": lambda c: kvpress.KeyRerotationPress(
    kvpress.StreamingLLMPress(c)
  ),
  "rerotated_keydiff": lambda c: kvpress.KeyRerotationPress(
    kvpress.KeyDiffPress(c)
  ),
  "lagkv": kvpress.LagKVPress,
  "lagkv_cross": lambda c: kvpress.LagKVPress(c, cross_scoring=True),
  "pyramidkv": kvpress.PyramidKVPress,
  "pyramidkv_2": lambda c: kvpress.PyramidKVPress(c, beta=2),
  "adakv": lambda c: kvpress.AdaKVPress(
    kvpress.SnapKVPress(c), alpha_safeguard=0.0
  ),
  "adakv_keydiff": lambda c: kvpress.AdaKVPress(
    kvpress.KeyDiffPress(c), alpha_safeguard=0.0
  ),
  "chunkkv": snapkv_in_chunks,
  "leverage": kvpress.LeverageScorePress,
  "noncausal": lambda c: kvpress.NonCausalAttnPress(c, chunk_size=259),
  "compactor": kvpress.CompactorPress,
  "adakv_default": lambda c: kvpress.AdaKVPress(kvpress.SnapKVPress(c)),
  "adakv_keydiff_default": lambda c: kvpress.AdaKVPress(
    kvpress.KeyDiffPress(c)
  ),
  "chunkkv_default": lambda c: kvpress.ChunkKVPress(kvpress.SnapKVPress(c)),
  "chunkkv_keydiff": lambda c: kvpress.ChunkKVPress(kvpress.KeyDiffPress(c)),
  "chunk": lambda c: kvpress.ChunkPress(kvpress.KeyDiffPress(c), 256),
  "block": lambda c: kvpress.BlockPress(kvpress.KnormPress(c)),
  "by_layer": by_layer,
  "expected": kvpress.ExpectedAttentionPress,
  "expected_stats": with_statistics,
  "q_filters": q_filters,
  "cur": kvpress.CURPress,
  "critical": lambda c: kvpress.CriticalKVPress(kvpress.SnapKVPress(c)),
  "critical_ada": lambda c: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(c)),
  "adakv_expected": lambda c: kvpress.AdaKVPress(
    kvpress.ExpectedAttentionPress(c, epsilon=1e-2)
  ),
  "critical_expected": lambda c: kvpress.CriticalKVPress(
    kvpress.ExpectedAttentionPress(c, use_vnorm=False)
  ),
  "critical_ada_expected": lambda c: kvpress.CriticalAdaKVPress(
    kvpress.ExpectedAttentionPress(c, use_vnorm=False)
  ),
  "finch": finch,
  "duo": kvpress.DuoAttentionPress,
  "kvzip": kvpress.KVzipPress,
  "kvzip_plus": lambda c: kvpress.KVzipPress(c, kvzip_plus_normalization=True),
  "kvzip_layer": lambda c: kvpress.KVzipPress(c, layerwise=True),
  "kvgrad": kvpress.KVgradPress,
  "simlayer": lambda c: kvpress.SimLayerKVPress(c, n_recent=RECENT),
  "think": kvpress.ThinKPress,
  "think_snapkv": lambda c: with_half_of_channels(kvpress.SnapKVPress(c)),
  "think_keydiff": lambda c: with_half_of_channels(kvpress.KeyDiffPress(c)),
  "kvzap_linear": lambda c: kvzap(c, "linear"),
  "kvzap": kvzap,
  "dms": dms,
  "fast_kvzip": fast_kvzip,
  "fast_kvzip_layer": lambda c: fast_kvzip(c, layerwise=True),
  "prefill_decoding": prefill_decoding,
}
EAGER = ("observed",)
# These turn keys, by which kept tokens are found: the same without that.
STILL = {
  "rerotated": kvpress.StreamingLLMPress,
  "rerotated_keydiff": kvpress.KeyDiffPress,
  "finch": lambda c: finch(c, rerotate_keys=False),
}
TURNING = (kvpress.KeyRerotationPress, kvpress.FinchPress)


def sketch():
  """Stands for the normal numbers that kvpress draws, [K, D, k]."""
  random = np.random.default_rng(SKETCH_DIM)
  drawn = random.standard_normal((HEADS, DIM, SKETCH_DIM))
  return drawn.astype(np.float32)


def scaled_sketch():
  """What keeps norms on average, as it is stored."""
  return sketch() / np.float32(np.sqrt(SKETCH_DIM))


def drawn(*size, **options):
  return torch.from_numpy(sketch())[None].reshape(size)


@contextlib.contextmanager
def given(tokenizer):
  """Presses read these numbers and this tokenizer, where they would load."""
  pattern = statistics()["full_attention_heads"]
  with (
    mock.patch.object(torch, "randn", drawn),
    mock.patch.object(
      kvpress.DuoAttentionPress,
      "load_attention_pattern",
      staticmethod(lambda model: (SINK, RECENT, pattern)),
    ),
    mock.patch.object(
      kvpress.presses.kvzip_press.AutoTokenizer,
      "from_pretrained",
      return_value=tokenizer,
    ),
  ):
    yield
