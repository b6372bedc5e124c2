"""Retrieval methods by name: `ctkvr`, `ctkvr.512`, `ctkvr:choice=equi`."""

from collections.abc import Mapping

from kvjax.options.naming import named
from kvjax.retrieval.base import Retrieval
from kvjax.retrieval.clusterkv import ClusterKV
from kvjax.retrieval.clusters import Clusters
from kvjax.retrieval.ctkvr import CTkvr, Lists
from kvjax.retrieval.flat import Flat
from kvjax.retrieval.magicpig import MagicPIG, Tables
from kvjax.retrieval.quest import Bounds, Quest
from kvjax.retrieval.shadowkv import Landmarks, ShadowKV
from kvjax.retrieval.squeezed import Squeezed, SqueezedAttention

RETRIEVALS: Mapping[str, type[Retrieval]] = {
  "clusterkv": ClusterKV,
  "ctkvr": CTkvr,
  "flat": Flat,
  "magicpig": MagicPIG,
  "quest": Quest,
  "shadowkv": ShadowKV,
  "squeezed": SqueezedAttention,
}

# What they prepare, for saved caches.
INDEXES: tuple[type, ...] = (
  Bounds,
  Clusters,
  Landmarks,
  Lists,
  Squeezed,
  Tables,
)

RETRIEVAL_PRESETS: Mapping[str, Retrieval] = {
  "ctkvr.512": CTkvr(reads=512),
  "ctkvr.1024": CTkvr(reads=1024),
  "magicpig.8x75": MagicPIG(bits=8, tables=75),
  "magicpig.10x150": MagicPIG(bits=10, tables=150),
}


def get_retrieval(name: str) -> Retrieval:
  """The retrieval method that a name stands for.

  A name is a method or a preset, then its options, each after a colon:
  `ctkvr:choice=equi:update=false`, `quest:dense_layers=0+1`.

  Raises:
    InputError: no such method, preset or option, or a value out of range.
  """
  return named(name.strip(), RETRIEVALS, RETRIEVAL_PRESETS)
