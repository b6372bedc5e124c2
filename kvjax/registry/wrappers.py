"""Names that are put before a method's name and a slash."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.allocation.adaptive import Adaptive
from kvjax.allocation.base import Allocation
from kvjax.allocation.floored import Floored
from kvjax.allocation.pyramid import Pyramid
from kvjax.allocation.rounded_pyramid import RoundedPyramid
from kvjax.errors import InputError
from kvjax.labels import add_prefix
from kvjax.methods.base import Method
from kvjax.methods.chunked import Chunked
from kvjax.methods.critical import Critical
from kvjax.methods.rerotated import Rerotated
from kvjax.methods.think import Think
from kvjax.methods.whole_chunks import WholeChunks
from kvjax.options.budgets import Rounding
from kvjax.registry.parsing import split_options, suggest, with_options
from kvjax.registry.registry import PREFIXES, Recipe


@dataclasses.dataclass(frozen=True)
class Wrapper:
  """What a name before a method does to its recipe.

  Attributes:
    summary: a one-line description for tables.
    outer: class of the method around the method, or of the allocation around
      its allocation; that is all that it takes.
    rounding: how a retention is rounded; None as the recipe says.
  """

  summary: str
  outer: type[Any]
  rounding: Rounding | None = None

  @property
  def spreads(self) -> bool:
    """Whether it spreads the budget, and leaves the method as it is."""
    return issubclass(self.outer, Allocation)


WRAPPERS: Mapping[str, Wrapper] = {
  "pyramid": Wrapper("lower layers keep more (PyramidKV)", Pyramid),
  "pyramid.kvpress": Wrapper(
    "the same, as PyramidKVPress counts", RoundedPyramid, rounding="kvpress"
  ),
  "ada": Wrapper("heads compete for a layer's budget (AdaKV)", Adaptive),
  "ada.kvpress": Wrapper(
    "the same above a floor per head (AdaKVPress)", Floored, rounding="kvpress"
  ),
  "critical": Wrapper(
    "scores are weighted by the norm of the projected value (CriticalKV)",
    Critical,
  ),
  "rerotate": Wrapper(
    "kept keys are re-rotated to consecutive positions (KeyRerotationPress)",
    Rerotated,
  ),
  "chunked": Wrapper(
    "every chunk of the prompt is compressed by itself (ChunkPress)", Chunked
  ),
  "think": Wrapper("keys lose channels that hardly matter (ThinK)", Think),
  "chunkkv.kvpress": Wrapper(
    "whole chunks are kept by their tokens' scores (ChunkKVPress)",
    WholeChunks,
    rounding="kvpress",
  ),
}


PREFIXES.update(name for name in WRAPPERS if "." not in name)
for _name, _wrapper in WRAPPERS.items():
  add_prefix(_name, _wrapper.outer)


def wrap(text: str, inner: Recipe, label: str) -> Recipe:
  """Puts a name before a recipe.

  Args:
    text: the name, with options of its own after colons.
    inner: the recipe.
    label: its name, for messages.

  Raises:
    InputError: there is no such name or option, or it does not fit the recipe.
  """
  name, *options = split_options(text)
  if name not in WRAPPERS:
    raise InputError(
      f"There is no {name!r} to put before a method{suggest(name, WRAPPERS)}; "
      f"there are {', '.join(WRAPPERS)}."
    )
  wrapper, method = WRAPPERS[name], inner.method
  rounding = wrapper.rounding or inner.rounding
  if not wrapper.spreads:
    if inner.allocation is not None:
      raise InputError(
        f"{name}/ changes what a method keeps, before its budget is spread, "
        f"and {label} spreads it; write it behind pyramid/ and ada/, directly "
        "before a method that does not."
      )
    wrapped: Method = with_options(
      name, wrapper.outer(method), options, nested=False
    )
    return Recipe(wrapped, None, rounding)
  _check_spread(name.partition(".")[0], inner, label)
  over = inner.allocation or method.allocation
  allocation: Allocation = with_options(
    name, wrapper.outer(over), options, nested=False
  )
  return Recipe(method, allocation, rounding)


def _check_spread(base: str, inner: Recipe, label: str) -> None:
  """Refuses to spread a budget that cannot be spread, or is already."""
  over = inner.allocation or inner.method.allocation
  if over.spreads_layers:
    pyramid = base == "ada" and isinstance(over, Pyramid)
    advice = "; write pyramid/ada/NAME for both" if pyramid else ""
    raise InputError(
      f"The budget of {label} cannot be spread unevenly over layers or heads: "
      f"its layers have their shares{advice}."
    )
  if base == "ada" and over.ragged:
    raise InputError(
      f"The heads of {label} have unequal shares already; give ada/ a method "
      "whose heads keep as many."
    )
