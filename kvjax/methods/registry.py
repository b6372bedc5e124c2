"""Methods by name: `snapkv`, `snapkv.kvpress`, `keydiff:anchor=mean_raw`."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvjax.errors import InputError
from kvjax.methods.adakv import AdaKV
from kvjax.methods.base import Method, check_choice
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
  base, *options = name.split(":")
  if base in PRESETS:
    method = PRESETS[base]
  elif base in METHODS:
    method = METHODS[base]()
  else:
    known = [*METHODS, *PRESETS]
    raise InputError(
      f"There is no method {base!r}{_near(base, known)}; the methods are "
      f"{', '.join(METHODS)}."
    )
  given: dict[str, Any] = {}
  for text in options:
    option, value = _option(base, method, text)
    if option in given:
      raise InputError(f"Option {option!r} of {base!r} is given twice.")
    given[option] = value
  return dataclasses.replace(method, **given)


def _option(base: str, method: Method, text: str) -> tuple[str, Any]:
  """One `name=value`, read as the type of the field's present value."""
  name, equals, value = text.partition("=")
  fields = [
    field.name
    for field in dataclasses.fields(method)
    if not isinstance(getattr(method, field.name), Method)
  ]
  if name not in fields:
    raise InputError(
      f"Method {base!r} has no option {name!r}{_near(name, fields)}; it has "
      f"{', '.join(fields) or 'none'}."
    )
  if not equals:
    raise InputError(f"Option {name!r} of {base!r} needs a value: {name}=...")
  read = _read(base, name, value, getattr(method, name))
  check_choice(type(method), name, read)
  return name, read


def _read(base: str, name: str, value: str, present: Any) -> Any:
  kind = type(present)
  try:
    if kind is tuple:
      return tuple(_number(int, part) for part in value.split("+"))
    if kind is bool:
      return {"true": True, "false": False}[value.lower()]
    return value if kind is str else _number(kind, value)
  except (ValueError, KeyError) as error:
    example = (
      "+".join(map(str, present or (0, 1))) if kind is tuple else present
    )
    raise InputError(
      f"Option {name!r} of {base!r} takes a value such as {example!r}; "
      f"{value!r} is not one."
    ) from error


def _number(kind: type[int] | type[float], text: str) -> int | float:
  """A number that fits an array's int32 or float32."""
  number = kind(text)
  if not abs(number) < 2**31:  # infinite and NaN do not either
    raise ValueError
  return number


def _near(word: str, known: Iterable[str]) -> str:
  close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
  return f" (did you mean {' or '.join(close)}?)" if close else ""
