"""Names that are put before a method's name and a slash."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from kvjax.allocation.adaptive import Adaptive
from kvjax.allocation.base import Allocation, Uniform
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
from kvjax.registry.registry import (
  PREFIXES,
  Recipe,
  check_no_method,
  check_options,
  check_spelling,
  same_definition,
)


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

  @property
  def extends(self) -> bool:
    """Whether it builds on what is behind it, or spreads the budget anew."""
    return "over" in _fields(self.outer)


WRAPPERS: dict[str, Wrapper] = {
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


def register_prefix(
  name: str, outer: type[Method | Allocation], *, summary: str = ""
) -> None:
  """Registers a name to put before those of methods, as `ada/` is.

  A class of methods gets the method behind the name as its field `over`; most
  are a `kvjax.methods.Around`. A class of allocations spreads the budget of
  that method: with a field `over` it gets the allocation that the method has
  already, and without one it refuses methods whose budget is spread.

  As with `kvjax.register`, the name is known in this process only, and a class
  of the same module and name replaces the one before.

  Args:
    name: lower-case letters, digits and underscores.
    outer: the class, a dataclass whose fields but `over` have defaults. They
      are options: `mine:size=3/keydiff`.
    summary: a one-line description for tables.

  Raises:
    InputError: the name is taken or cannot be written on a command line, or
      the class is no such dataclass.

  Examples:
    >>> import dataclasses, kvjax
    >>> @dataclasses.dataclass(frozen=True)
    ... class Same(kvjax.methods.Around):
    ...   pass
    >>> kvjax.register_prefix("same_example", Same, summary="changes nothing")
    >>> kvjax.get_method("same_example/tova")
    Same(over=Tova(scope='layer', protect_last=False))
  """
  check_spelling("A name before methods", name)
  check_no_method(name, outer)
  _check_outer(outer)
  known = WRAPPERS.get(name)
  if known is not None and not same_definition(known.outer, outer):
    raise InputError(
      f"{name}/ is there already; register yours under another name."
    )
  WRAPPERS[name] = Wrapper(summary, outer)
  PREFIXES.add(name)
  add_prefix(name, outer)


def _check_outer(outer: Any) -> None:
  """Refuses what cannot be made of a method or an allocation alone."""
  kinds = (Method, Allocation)
  if not isinstance(outer, type) or not issubclass(outer, kinds):
    raise InputError(
      "What stands before methods is a class of kvjax.methods.Around or of "
      f"kvjax.allocation.Allocation; {outer!r} is not."
    )
  check_options(outer)
  name, fields = outer.__name__, _fields(outer)
  if inspect.isabstract(outer):
    unwritten = ", ".join(sorted(outer.__abstractmethods__))
    raise InputError(f"{name} lacks what each such class defines: {unwritten}.")
  missing = [
    field
    for field, has_default in fields.items()
    if not has_default and field != "over"
  ]
  if missing:
    raise InputError(f"Options of {name} need defaults: {', '.join(missing)}.")
  if issubclass(outer, Method) and "over" not in fields:
    raise InputError(
      f"{name} gets the method behind its name as the field 'over', which it "
      "does not have; make it a kvjax.methods.Around."
    )


def _fields(outer: type[Any]) -> Mapping[str, bool]:
  """The fields that a class takes, and whether they have defaults."""
  if not dataclasses.is_dataclass(outer):
    return {}
  none = dataclasses.MISSING
  return {
    field.name: field.default is not none or field.default_factory is not none
    for field in dataclasses.fields(outer)
    if field.init
  }


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
  if not wrapper.extends and not isinstance(over, Uniform):
    raise InputError(
      f"{name}/ spreads a budget anew, and that of {label} is spread already; "
      "give it a method whose layers and heads keep equally many tokens."
    )
  outer = wrapper.outer(over) if wrapper.extends else wrapper.outer()
  allocation: Allocation = with_options(name, outer, options, nested=False)
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
