"""Registration of the retrieval methods of this package."""

from kvjax.registry.registry import register
from kvjax.retrieval.clusterkv import ClusterKV
from kvjax.retrieval.ctkvr import CTkvr
from kvjax.retrieval.flat import Flat
from kvjax.retrieval.magicpig import MagicPIG
from kvjax.retrieval.quest import Quest
from kvjax.retrieval.shadowkv import ShadowKV
from kvjax.retrieval.squeezed import SqueezedAttention


def register_retrievals() -> None:
  """Registers all of them; called once, when kvjax is imported."""
  register(
    "ctkvr",
    CTkvr,
    presets={"512": CTkvr(keys=512), "1024": CTkvr(keys=1024)},
    summary="CTkvr",
  )
  register("flat", Flat, summary="exact search")
  register("quest", Quest, summary="Quest", paper="2406.10774")
  register(
    "shadowkv", ShadowKV, summary="ShadowKV, landmarks", paper="2410.21465"
  )
  register(
    "magicpig",
    MagicPIG,
    presets={
      "8x75": MagicPIG(bits=8, tables=75),
      "10x150": MagicPIG(bits=10, tables=150),
    },
    summary="MagicPIG",
    paper="2410.16179",
  )
  register("clusterkv", ClusterKV, summary="ClusterKV", paper="2412.03213")
  register(
    "squeezed",
    SqueezedAttention,
    summary="Squeezed Attention",
    paper="2411.09688",
  )
