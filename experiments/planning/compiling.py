"""Compiles prefill and decoding for a slice, and measures what they need."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from kvjax.engine.prepared import waits
from kvjax.errors import InputError
from kvjax.experiments.compilation.chips import Chip
from kvjax.experiments.compilation.engine_programs import (
  Use,
  lower_decode,
  lower_prefill,
)
from kvjax.experiments.planning.sizes import Sizes, sizes
from kvjax.kernels.compiled.collectives import Collective
from kvjax.model import LayerSpec

# Layers of one kind are a loop. Of caches with more kinds than this, such as
# those with a budget for each layer, at most so many layers are compiled.
MOST_KINDS = 8
SHALLOW = 4

# Called with what is being compiled, and the number of programs compiled.
Advance = Callable[[str, float], None]


class TooLargeError(InputError):
  """Even a few layers of a model take more memory than a device has."""


class Sent(NamedTuple):
  """What a device receives by collectives of one kind.

  Attributes:
    times: how often they run.
    nbytes: bytes of their results.
  """

  times: int
  nbytes: int


@dataclasses.dataclass(frozen=True)
class Needs:
  """What a program needs besides weights and cache.

  Attributes:
    temporary: bytes of intermediate results, of the program itself, and of
      other arguments and results.
    moved: bytes between memory and cores; of a step, for decoding.
    sent: what devices send each other, by kind; of a step, for decoding.
  """

  temporary: int
  moved: int
  sent: Mapping[str, Sent]


@dataclasses.dataclass(frozen=True)
class Planned:
  """What a method takes on each device of a slice.

  Attributes:
    use: the method, the model, and their sizes.
    chip: the devices.
    sizes: what weights and cache take.
    prefill: what `kvjax.prefill` needs.
    decode: what decoding needs.
    refused: whether the compiler refused the whole model, as it takes too much.
  """

  use: Use
  chip: Chip
  sizes: Sizes
  prefill: Needs
  decode: Needs
  refused: bool = False

  def hbm(self, needs: Needs) -> int:
    """Bytes of device memory while a program runs."""
    return self.sizes.weights + self.sizes.cache + needs.temporary

  @property
  def most(self) -> int:
    """Bytes of device memory at most."""
    return max(self.hbm(self.prefill), self.hbm(self.decode))

  @property
  def fits(self) -> bool:
    """Whether a device has as much memory."""
    return not self.refused and self.most <= self.chip.hbm_bytes


def compile_use(use: Use, chip: Chip, advance: Advance) -> Planned:
  """Compiles prefill and decoding for a slice.

  The compiler refuses what does not fit. What the whole model needs then
  follows from a few layers.

  Raises:
    TooLargeError: even a few layers do not fit.
    InputError: the prefill depends on numbers, which shapes do not have, or
      the compiler refuses a program for another reason.
  """
  whole = sizes(use, chip)
  refused = False
  for depths in _depths(use, chip, whole):
    try:
      found = _compile_depths(use, chip, depths, advance)
    except TooLargeError:
      refused |= depths == (use.model.layers,)
    else:
      return Planned(use, chip, whole, *found, refused)
  raise TooLargeError(
    f"A batch of {use.rows} does not fit on {chip.name}: even {depths[0]} of "
    f"{use.model.layers} layers take more memory than a device has."
  )


def decode_beyond(
  use: Use, chip: Chip, advance: Advance
) -> tuple[int, Needs] | None:
  """Compiles the decoding of a larger batch, if another program decodes it.

  Returns:
    The least rows of which experts are not read for each token alone, and what
    decoding them needs; None without experts, or if the batch has as many rows.

  Raises:
    TooLargeError: it takes more memory than a device has.
  """
  layers = use.model.layers
  experts = use.model.config(layers).experts
  if experts is None:
    return None
  rows = chip.rows * (experts.most_alone + 1)
  if rows <= use.rows:
    return None
  larger = dataclasses.replace(use, rows=rows)
  return rows, _compile_kind("decode", larger, chip, layers, 1, advance)


def _depths(use: Use, chip: Chip, whole: Sizes) -> list[tuple[int, ...]]:
  """Lists what to compile until it fits: all layers, or two numbers of some.

  A loop compiles as fast for many layers as for few. Of many, a compiler does
  not keep in VMEM what it could not for all.
  """
  layers = use.model.layers
  period = _period(use.model.config(layers).geometry.layers)

  def some(most: int) -> tuple[int, ...]:
    half = max(1, most // (2 * period)) * period
    return (half, 2 * half)

  pairs = [some(layers // 2)] if whole.kinds <= MOST_KINDS else []
  pairs.append(some(period * SHALLOW))
  known = [pair for pair in pairs if pair[-1] < layers]
  fits = whole.weights + whole.cache <= chip.hbm_bytes
  if not known or (fits and whole.kinds <= MOST_KINDS):
    return [(layers,), *known]
  return known


def _compile_depths(
  use: Use, chip: Chip, depths: Sequence[int], advance: Advance
) -> tuple[Needs, Needs]:
  """Compiles all layers, or continues a line through two numbers of some.

  Returns:
    The needs of prefill and of decoding.
  """
  found = [_compile(use, chip, depth, len(depths), advance) for depth in depths]
  prefills, decodes = zip(*found, strict=True)
  if len(depths) == 1:
    return found[0]
  prefill = extrapolate(depths, prefills, use.model.layers)
  if use.plan.schedule.block is None and not waits(use.plan):
    # A prefill of whole prompts frees what a layer needed once the next one is
    # done, however many follow.
    held = max(each.temporary for each in prefills)
    prefill = dataclasses.replace(prefill, temporary=held)
  return prefill, extrapolate(depths, decodes, use.model.layers)


def _compile(
  use: Use, chip: Chip, layers: int, parts: int, advance: Advance
) -> tuple[Needs, Needs]:
  """Compiles the first layers; returns the needs of prefill and decoding.

  Args:
    use: the method and the model.
    chip: the devices.
    layers: number of layers.
    parts: how many numbers of layers stand for the whole model.
    advance: shows progress.
  """
  prefill = _compile_kind("prefill", use, chip, layers, parts, advance)
  return prefill, _compile_kind("decode", use, chip, layers, parts, advance)


def _compile_kind(
  kind: str, use: Use, chip: Chip, layers: int, parts: int, advance: Advance
) -> Needs:
  """Compiles one of the two programs; see `_compile`.

  Raises:
    TooLargeError: it takes more memory than a device has.
    InputError: the compiler refuses it for another reason.
  """
  given = sizes(use, chip, layers)
  about = f"{chip.name}, {kind}, batch {use.rows}, {layers} layers"
  advance(about, 0)
  lower = lower_prefill if kind == "prefill" else lower_decode
  try:
    footprint = lower(use, layers, chip).measure()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" in str(error):
      raise TooLargeError(
        f"A batch of {use.rows} does not fit on {chip.name}."
      ) from error
    first, *_ = str(error).strip().splitlines() or ["no reason"]
    raise InputError(
      f"{use.name} does not compile for {chip.name}, where the compiler says: "
      f"{first[:300].rstrip('.')}."
    ) from error
  jax.clear_caches()  # traced programs are large and not needed again
  advance(about, 1 / parts)
  return Needs(
    footprint.hbm - given.weights - given.cache,
    footprint.moved,
    _by_kind(footprint.sent),
  )


def extrapolate(
  depths: Sequence[int], found: Sequence[Needs], layers: int
) -> Needs:
  """Continues a line through what two numbers of layers need.

  Args:
    depths: two numbers of layers.
    found: what they need.
    layers: number of layers of the whole model.
  """
  (first, second), (one, other) = depths, found

  def line(a: int, b: int) -> int:
    return max(0, round(a + (b - a) * (layers - first) / (second - first)))

  none = Sent(0, 0)
  sent = {
    opcode: Sent(*map(line, one.sent.get(opcode, none), numbers))
    for opcode, numbers in other.sent.items()
  }
  return Needs(
    line(one.temporary, other.temporary), line(one.moved, other.moved), sent
  )


def _by_kind(found: Sequence[Collective]) -> Mapping[str, Sent]:
  """Adds up collectives of one kind."""
  sums: dict[str, Sent] = {}
  for each in found:
    times, nbytes = sums.get(each.opcode, Sent(0, 0))
    sums[each.opcode] = Sent(
      times + each.times, nbytes + each.times * each.nbytes
    )
  return sums


def _period(layers: Sequence[LayerSpec]) -> int:
  """Returns the length of the pattern that a model's layers repeat."""
  return next(
    period
    for period in range(1, len(layers) + 1)
    if all(a == b for a, b in zip(layers[period:], layers, strict=False))
  )
