"""Registration of the eviction methods of this package."""

import dataclasses

from kvjax.allocation.adaptive import Adaptive
from kvjax.allocation.base import Allocation, Uniform
from kvjax.allocation.floored import Floored
from kvjax.allocation.pyramid import Pyramid
from kvjax.allocation.rounded_pyramid import RoundedPyramid
from kvjax.allocation.streaming_heads import StreamingHeads
from kvjax.methods.base import Method
from kvjax.methods.chunk_attention import ChunkAttention
from kvjax.methods.chunkkv import ChunkKV
from kvjax.methods.compactor import Compactor
from kvjax.methods.critical import Critical
from kvjax.methods.cur import Cur
from kvjax.methods.dropkv import DropKV
from kvjax.methods.expected_attention import ExpectedAttention
from kvjax.methods.fast_kvzip import FastKVzip
from kvjax.methods.finch import Finch
from kvjax.methods.full import FullKV
from kvjax.methods.h2o import H2O
from kvjax.methods.key_norm import KeyL2Norm
from kvjax.methods.keydiff import KeyDiff
from kvjax.methods.kvzap import KVzap
from kvjax.methods.kvzip import KVzip
from kvjax.methods.lagkv import LagKV
from kvjax.methods.leverage_scores import LeverageScores
from kvjax.methods.protokv import ProtoKV
from kvjax.methods.q_filters import QFilters
from kvjax.methods.random import Random
from kvjax.methods.rerotated import Rerotated
from kvjax.methods.rkv import RKV
from kvjax.methods.simlayer import SimLayer
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.streaming import StreamingLLM
from kvjax.methods.tova import Tova
from kvjax.methods.triattention import TriAttention
from kvjax.methods.whole_chunks import WholeChunks
from kvjax.registry.registry import Recipe, register

_SNAPKV = SnapKV(window=64, kernel=5, pooling="avg")


def _pyramidkv() -> Recipe:
  return Recipe(SnapKV(window=8, kernel=7, pooling="max"), Pyramid(Uniform()))


def _adakv() -> Recipe:
  return Recipe(SnapKV(window=32, kernel=7, pooling="max"), Adaptive(Uniform()))


def _criticalkv() -> Critical:
  return Critical(SnapKV(window=32, kernel=7, pooling="max"))


def _criticaladakv() -> Recipe:
  return Recipe(_criticalkv(), Adaptive(Uniform()))


def _finch() -> Rerotated:
  return Rerotated(Finch())


def _duoattention() -> Recipe:
  return Recipe(StreamingLLM(sinks=128, recent_frac=0.5), StreamingHeads())


def _kvpress(method: Method, allocation: Allocation | None = None) -> Recipe:
  """A recipe that rounds retentions as kvpress does."""
  return Recipe(method, allocation, "kvpress")


def register_methods() -> None:
  """Registers all of them; called once, when kvjax is imported."""
  register("full", FullKV, summary="full cache")
  register("random", Random, summary="random eviction")
  register(
    "streaming",
    StreamingLLM,
    presets={"kvpress": _kvpress(StreamingLLM())},
    summary="StreamingLLM",
    paper="2309.17453",
  )
  register(
    "key_norm",
    KeyL2Norm,
    presets={
      "lagkv": KeyL2Norm(skip_layers=(0, 1)),
      "kvpress": _kvpress(KeyL2Norm()),
    },
    summary="small key norm (L2)",
    paper="2406.11430",
  )
  register(
    "h2o",
    H2O,
    presets={
      "keydiff": H2O(recent_frac=0.0),
      "kvpress": _kvpress(H2O(recent_frac=0.0, normalize=True)),
      "compactor": H2O(paper_postproc=True),
    },
    summary="H2O",
    paper="2306.14048",
  )
  register(
    "tova",
    Tova,
    presets={
      "keydiff": Tova(scope="group"),
      "kvpress": _kvpress(Tova(protect_last=True)),
    },
    summary="TOVA",
    paper="2401.06104",
  )
  register(
    "snapkv",
    SnapKV,
    presets={
      "orig": SnapKV(window=32, kernel=5, pooling="avg"),
      "longbench": SnapKV(window=32, kernel=7, pooling="max"),
      "factory": SnapKV(window=8, kernel=7, pooling="max"),
      "keydiff": SnapKV(window=32, kernel=7, pooling="avg"),
      "kvpress": _kvpress(_SNAPKV),
      "kvpress_decoding": _kvpress(
        dataclasses.replace(_SNAPKV, queries_at="last")
      ),
      "compactor": SnapKV(window=32, kernel=1, paper_postproc=True),
    },
    summary="SnapKV",
    paper="2404.14469",
  )
  register(
    "pyramidkv",
    _pyramidkv,
    presets={"kvpress": _kvpress(_SNAPKV, RoundedPyramid(Uniform()))},
    summary="PyramidKV",
    paper="2406.02069",
  )
  register(
    "adakv",
    _adakv,
    presets={"kvpress": _kvpress(_SNAPKV, Floored(Uniform()))},
    summary="AdaKV",
    paper="2407.11550",
  )
  register(
    "chunkkv",
    ChunkKV,
    presets={"kvpress": _kvpress(WholeChunks(_SNAPKV))},
    summary="ChunkKV",
    paper="2502.00299",
  )
  register(
    "keydiff",
    KeyDiff,
    presets={
      "paper": KeyDiff(),
      "noblock": KeyDiff(),
      "kvpress": _kvpress(KeyDiff()),
    },
    summary="KeyDiff",
    paper="2504.15364",
  )
  register(
    "lagkv",
    LagKV,
    presets={
      "paper": LagKV(),
      "kvpress": _kvpress(LagKV(sinks=4, lag=128, mode="kvpress")),
      "local": LagKV(reference="own"),
      "key_norm": LagKV(score="key_norm", skip_layers=(0, 1)),
    },
    summary="LagKV",
    paper="2504.04704",
  )
  register(
    "compactor",
    Compactor,
    presets={
      "paper": Compactor(),
      "kvpress": _kvpress(
        Compactor(
          blend_removed=True,
          sketch_dim=48,
          solver="chol",
          center=True,
          z_scope="layer",
          first=8,
          last=4,
        )
      ),
      # Padding queries add no attention, unlike in compactor-vllm.
      "vllm": Compactor(
        blend=0.5,
        sketch_dim=48,
        center=True,
        leverage_chunk=512,
        chunk=128,
        value_norm="none",
        pool=1,
        z_scope="chunk",
        first=16,
        last=64,
        score_ends=True,
        retention_of="middle",
        spread="layer",
      ),
    },
    summary="Compactor",
    paper="2507.08143",
  )
  register(
    "leverage",
    LeverageScores,
    presets={
      "kvpress": _kvpress(
        LeverageScores(sketch_dim=48, solver="chol", center=True)
      )
    },
    summary="Compactor's leverage alone",
    paper="2507.08143",
  )
  register(
    "noncausal",
    ChunkAttention,
    presets={"kvpress": _kvpress(ChunkAttention())},
    summary="Compactor's attention alone",
    paper="2507.08143",
  )
  register(
    "protokv",
    ProtoKV,
    presets={
      "paper": ProtoKV(tokens_per_prototype=1, score="qk_sum"),
      "sat": ProtoKV(clusters="none"),
      "chunk": ProtoKV(anchors=0),
      "lsh": ProtoKV(clusters="lsh", bits=9),
      "kmeans": ProtoKV(clusters="kmeans"),
      # The retrieval methods of these names, as they would evict after a
      # prefill.
      "clusterkv": ProtoKV(
        sinks=16,
        clusters="kmeans",
        prototypes=400,
        tokens_per_prototype=80,
        iterations=20,
        score="qk_mean",
        cut="position",
      ),
      "squeezed": ProtoKV(
        clusters="kmeans",
        prototypes=1600,
        tokens_per_prototype=20,
        iterations=300,
        score="attn_center",
        cut="position",
      ),
    },
    summary="ProtoKV",
  )
  register(
    "expected_attention",
    ExpectedAttention,
    presets={"kvpress": _kvpress(ExpectedAttention())},
    summary="Expected Attention",
    paper="2510.00636",
  )
  register(
    "criticalkv",
    _criticalkv,
    presets={"kvpress": _kvpress(Critical(_SNAPKV))},
    summary="CriticalKV",
    paper="2502.03805",
  )
  register(
    "criticaladakv",
    _criticaladakv,
    presets={"kvpress": _kvpress(Critical(_SNAPKV), Floored(Uniform()))},
    summary="CriticalAdaKV",
    paper="2502.03805",
  )
  register(
    "cur",
    Cur,
    presets={"kvpress": _kvpress(Cur())},
    summary="CurDKV",
    paper="2509.15038",
  )
  register(
    "qfilters",
    QFilters,
    presets={"kvpress": _kvpress(QFilters())},
    summary="Q-Filters",
    paper="2503.02812",
  )
  register("dropkv", DropKV, summary="DropKV")
  register(
    "finch",
    _finch,
    presets={"kvpress": _kvpress(_finch())},
    summary="FINCH",
    paper="2408.00167",
  )
  register(
    "duoattention", _duoattention, summary="DuoAttention", paper="2410.10819"
  )
  register("simlayerkv", SimLayer, summary="SimLayerKV", paper="2410.13846")
  register(
    "kvzip",
    KVzip,
    presets={
      "plus": KVzip(weight="output"),
      "grad": KVzip(weight="gradient", chunk=512),
      "kvpress": _kvpress(KVzip(chunk=2048, sinks=4)),
      "kvpress_plus": _kvpress(KVzip(weight="output", chunk=2048, sinks=4)),
      "kvpress_grad": _kvpress(KVzip(weight="gradient", chunk=512, sinks=4)),
    },
    summary="KVzip",
    paper="2505.23416",
  )
  register(
    "kvzap",
    KVzap,
    presets={"kvpress": _kvpress(KVzap(level="head"))},
    summary="KVzap",
    paper="2601.07891",
  )
  register(
    "fast_kvzip",
    FastKVzip,
    presets={"kvpress": _kvpress(FastKVzip())},
    summary="Fast KVzip",
    paper="2601.17668",
  )
  register(
    "rkv",
    RKV,
    presets={"code": RKV(importance=0.07)},
    summary="R-KV",
    paper="2505.24133",
  )
  register(
    "triattention",
    TriAttention,
    presets={"code": TriAttention(choice="head")},
    summary="TriAttention",
    paper="2604.04921",
  )
