"""Slices of TPUs by the names that tools give them."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from kvjax.errors import InputError
from kvjax.experiments.compilation.chips import Chip
from kvjax.registry.parsing import suggest


def _by_chips(topologies: str) -> Mapping[int, str]:
  """Lists topologies by their numbers of chips."""
  return {math.prod(map(int, x.split("x"))): x for x in topologies.split()}


_FLAT = _by_chips("1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16")
_DEEP = _by_chips("2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8")


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of chip. JAX knows its bandwidth and products; this is the rest.

  Attributes:
    shapes: libtpu's topologies by their numbers of chips.
    named: what the number in a slice's name counts, per chip: chips or cores.
    devices: JAX devices of a chip.
    programs_gib: GiB of a device's memory that the compiler lets programs use;
      it refuses what takes more, and says so.
    link_bytes_per_second: what a chip receives from others at most: half of the
      bidirectional bandwidth of all its links.
  """

  shapes: Mapping[int, str]
  named: int
  devices: int
  programs_gib: float
  link_bytes_per_second: int


# Bandwidths are those of the page of each kind.
KINDS: Mapping[str, Kind] = {
  "v5e": Kind(_FLAT, 1, 1, 15.75, 200 * 10**9),
  "v5p": Kind(_DEEP, 2, 1, 95.73, 600 * 10**9),
  "v6e": Kind(_FLAT, 1, 1, 31.24, 400 * 10**9),
  "tpu7x": Kind({1: "1x1x1", **_DEEP}, 2, 2, 94.74, 600 * 10**9),
}
PAGE = "https://docs.cloud.google.com/tpu/docs/"


@dataclasses.dataclass(frozen=True)
class Slice:
  """A number of connected chips.

  Attributes:
    name: such as v5e-8; the number counts cores of v5p and tpu7x.
    kind: one of `KINDS`.
    chips: number of chips.
  """

  name: str
  kind: str
  chips: int

  @property
  def topology(self) -> str:
    """Libtpu's name of the topology."""
    return f"{self.kind}:{KINDS[self.kind].shapes[self.chips]}"

  @property
  def devices(self) -> int:
    """Number of JAX devices."""
    return self.chips * KINDS[self.kind].devices

  @property
  def link_bytes_per_second(self) -> float:
    """What a device receives from others at most."""
    kind = KINDS[self.kind]
    return kind.link_bytes_per_second / kind.devices

  def load(self, rows: int, kv_heads: int, tokens: int = 1) -> Chip:
    """Loads its devices, on a mesh.

    Args:
      rows: size of the axis "data".
      kv_heads: KV heads of a layer, which the other devices share out.
      tokens: size of the axis "context".
    """
    chip = Chip.load(self.kind, self.topology)
    return dataclasses.replace(
      chip,
      name=self.name,
      hbm_bytes=int(KINDS[self.kind].programs_gib * 2**30),
      rows=rows,
      kv_heads=kv_heads,
      tokens=tokens,
    )


def slices_of(kind: str) -> Iterator[Slice]:
  """Yields the slices of a kind of chip, the smallest first."""
  for chips in KINDS[kind].shapes:
    yield Slice(f"{kind}-{chips * KINDS[kind].named}", kind, chips)


SLICES = {each.name: each for kind in KINDS for each in slices_of(kind)}
# Cloud tools call a v5e so.
_LITE = "v5litepod-"


def find_slice(name: str) -> Slice:
  """Finds a slice by its name.

  Raises:
    InputError: there is none.

  Examples:
    >>> from kvjax.experiments.planning.slices import find_slice
    >>> find_slice("v5p-32").topology
    'v5p:2x2x4'
  """
  if name.startswith(_LITE):
    name = f"v5e-{name.removeprefix(_LITE)}"
  if name not in SLICES:
    kinds = [
      f"{kind}-" + "/".join(x.name.partition("-")[2] for x in slices_of(kind))
      for kind in KINDS
    ]
    raise InputError(
      f"There is no slice {name[:60]!r}{suggest(name, SLICES)}; there are "
      f"{', '.join(kinds)}."
    )
  return SLICES[name]


def check_devices(slice_: Slice, sizes: Mapping[str, int]) -> None:
  """Refuses a mesh that is not of a whole slice.

  Raises:
    InputError: the mesh has another number of devices.
  """
  count = math.prod(sizes.values())
  if count != slice_.devices:
    raise InputError(
      f"--mesh has {count} devices; {slice_.name} has {slice_.devices}."
    )
