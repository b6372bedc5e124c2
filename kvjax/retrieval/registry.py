"""Retrieval methods by name: `ctkvr`, `ctkvr.512`, `ctkvr:choice=equi`."""

from collections.abc import Mapping

from kvjax.naming import named
from kvjax.retrieval.base import Retrieval
from kvjax.retrieval.ctkvr import CTkvr
from kvjax.retrieval.flat import Flat

RETRIEVALS: Mapping[str, type[Retrieval]] = {
  "ctkvr": CTkvr,
  "flat": Flat,
}

RETRIEVAL_PRESETS: Mapping[str, Retrieval] = {
  "ctkvr.512": CTkvr(reads=512),
  "ctkvr.1024": CTkvr(reads=1024),
}


def get_retrieval(name: str) -> Retrieval:
  """The retrieval method that a name stands for.

  A name is a method or a preset, then its options, each after a colon:
  `ctkvr:choice=equi:update=false`, `quest:dense_layers=0+1`.

  Raises:
    InputError: no such method, preset or option, or a value out of range.
  """
  return named(name.strip(), RETRIEVALS, RETRIEVAL_PRESETS)
