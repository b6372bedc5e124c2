"""Methods by name: `snapkv`, `snapkv.kvpress`, `keydiff:anchor=mean_raw`."""

from collections.abc import Callable, Mapping

from kvjax.methods.adakv import AdaKV
from kvjax.methods.base import Method
from kvjax.methods.chunkkv import ChunkKV
from kvjax.methods.compactor import Compactor
from kvjax.methods.full import FullKV
from kvjax.methods.h2o import H2O
from kvjax.methods.key_norm import KeyL2Norm
from kvjax.methods.keydiff import KeyDiff
from kvjax.methods.lagkv import LagKV
from kvjax.methods.protokv import ProtoKV
from kvjax.methods.pyramid import Pyramid
from kvjax.methods.random import Random
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.streaming import StreamingLLM
from kvjax.methods.tova import Tova
from kvjax.options.naming import named

METHODS: Mapping[str, type[Method]] = {
  "full": FullKV,
  "random": Random,
  "streaming": StreamingLLM,
  "key_norm": KeyL2Norm,
  "h2o": H2O,
  "tova": Tova,
  "snapkv": SnapKV,
  "pyramidkv": Pyramid,
  "adakv": AdaKV,
  "chunkkv": ChunkKV,
  "keydiff": KeyDiff,
  "lagkv": LagKV,
  "compactor": Compactor,
  "protokv": ProtoKV,
}

# In front of a name they spread its budget over layers or heads.
WRAPPERS: Mapping[str, Callable[[Method], Method]] = {
  "pyramid/": Pyramid,
  "ada/": AdaKV,
}

PRESETS: Mapping[str, Method] = {
  "h2o.keydiff": H2O(recent_frac=0.0),
  "h2o.kvpress": H2O(recent_frac=0.0, normalise=True),
  "h2o.compactor": H2O(paper_postproc=True),
  "keydiff.paper": KeyDiff(),
  "keydiff.noblock": KeyDiff(),
  "lagkv.paper": LagKV(),
  "lagkv.kvpress": LagKV(sinks=4, lag=128, mode="kvpress"),
  "lagkv.local": LagKV(reference="own"),
  "lagkv.key_norm": LagKV(score="key_norm", skip_layers=(0, 1)),
  "compactor.paper": Compactor(),
  "compactor.kvpress": Compactor(
    blend_removed=True,
    sketch_dim=48,
    solver="chol",
    center=True,
    z_scope="layer",
    first=8,
    last=4,
  ),
  "compactor.vllm": Compactor(
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
  "protokv.paper": ProtoKV(),
  "protokv.sat": ProtoKV(clusters="none"),
  "protokv.chunk": ProtoKV(anchors=0),
  "protokv.lsh": ProtoKV(clusters="lsh", bits=9),
  "protokv.kmeans": ProtoKV(clusters="kmeans"),
  "key_norm.lagkv": KeyL2Norm(skip_layers=(0, 1)),
  "tova.keydiff": Tova(scope="group"),
  "tova.kvpress": Tova(protect_last=True),
  "snapkv.orig": SnapKV(window=32, kernel=5, pooling="avg"),
  "snapkv.longbench": SnapKV(window=32, kernel=7, pooling="max"),
  "snapkv.factory": SnapKV(window=8, kernel=7, pooling="max"),
  "snapkv.keydiff": SnapKV(window=32, kernel=7, pooling="avg"),
  "snapkv.kvpress": SnapKV(window=64, kernel=5, pooling="avg"),
  "snapkv.compactor": SnapKV(window=32, kernel=1, paper_postproc=True),
}


def get_method(name: str) -> Method:
  """The method that a name stands for.

  A name is a method or a preset, then its options, each after a colon:
  `keydiff:anchor=median_unit:recent_frac=0.1`. The values of a list are joined
  by plus signs: `key_norm:skip_layers=0+1`. In front, `pyramid/` spreads the
  budget of any method over the layers and `ada/` that of a scoring method over
  the heads: `pyramid/keydiff`, `pyramid/ada/snapkv`.

  Raises:
    InputError: no such method, preset or option, or a value out of range.
  """
  name = name.strip()
  for prefix, wrapper in WRAPPERS.items():
    if name.startswith(prefix):
      return wrapper(get_method(name.removeprefix(prefix)))
  return named(name, METHODS, PRESETS)
