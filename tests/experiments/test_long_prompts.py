"""Long prompts take of a device what docs/sharding.md says of them."""

import dataclasses
import pathlib
import re

import pytest
from plans_here import LIBTPU

from kvjax.experiments.compilation import chips
from kvjax.experiments.compilation.engine_programs import (
  lower_decode,
  lower_prefill,
)
from kvjax.experiments.planning import long_prompts, slices
from kvjax.experiments.planning.long_prompts import CASES, HEADER, Case
from kvjax.experiments.planning.sizes import sizes

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / long_prompts.PAGE).read_text(encoding="utf-8")
LAYERS = 2


def printed(case):
  """The numbers of a line of the page, in MiB."""
  named = f"| {' | '.join(case.named)} | "
  (rest,) = (
    line.removeprefix(named)
    for line in PAGE.splitlines()
    if line.startswith(named)
  )
  numbers = rest.strip("| ").replace(",", "").split(" | ")
  return dict(zip(HEADER[3:], map(float, numbers), strict=True))


def test_the_page_has_every_case():
  """`python -m kvjax.experiments.planning.long_prompts` writes them."""
  lines = [[*case.named, *_cells(printed(case))] for case in CASES]
  assert long_prompts.replace_table(PAGE, lines) == PAGE


def _cells(numbers):
  return [f"{x:,.0f}" if x >= 100 else f"{x:g}" for x in numbers.values()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case.named))
def test_meshes_are_of_whole_slices(case):
  slices.check_devices(
    slices.find_slice(case.slice), long_prompts.parse_sizes(case.mesh)
  )


@pytest.mark.libtpu
def test_a_packed_cache_takes_less_of_a_device_than_a_full_one():
  """As the page says of eight chips."""
  chips.prepare_libtpu()
  full = Case("v5e-8", "model:8", 131_072, "full", 1.0)
  packed = dataclasses.replace(full, method="ada/snapkv", retention=0.25)
  taken = [sizes(each.use, each.chip) for each in (packed, full)]
  said = [f"{(x.weights + x.cache) / 2**30:.2f} GiB" for x in taken]
  (printed,) = re.findall(
    r"take (.* GiB) of each chip with\n.*, and (.* GiB) with `full`", PAGE
  )
  assert [*printed] == said
  assert taken[0].cache < 0.26 * taken[1].cache


# Eight KV heads on sixteen devices, and on sixty-four that share out tokens.
UNEVEN = Case("v5e-16", "model:16", 32_768, "full", 1.0)
SHARED = Case("v5e-64", "context:8,model:8", 131_072, "full", 1.0)


def taken(case):
  """Bytes that two layers take of a device, and temporaries of programs."""
  use, chip = case.use, case.chip
  given = sizes(use, chip, LAYERS)
  hbm = [
    lower(use, LAYERS, chip).measure().hbm
    for lower in (lower_prefill, lower_decode)
  ]
  return given, [most - given.weights - given.cache for most in hbm]


@pytest.mark.libtpu
@pytest.mark.parametrize(
  ("full", "copies"), [(UNEVEN, 2), (SHARED, 1)], ids=["uneven", "shared"]
)
def test_what_is_kept_takes_its_share_of_a_device(full, copies):
  """Pages are shared out over all devices; what follows them is in slots."""
  chips.prepare_libtpu()
  kept = dataclasses.replace(full, method="keydiff", retention=0.25)
  (whole, of_full), (some, of_kept) = map(taken, (full, kept))
  # Keys, values and positions of a head's tokens, and room for the answer.
  slot = LAYERS * 8 * (2 * 128 * 2 + 4)
  devices = len(full.chip.devices)
  for share, found in ((1.0, whole), (0.25, some)):
    tokens = share * full.tokens + copies * full.use.answer
    expected = slot * tokens / devices
    assert found.cache == pytest.approx(expected, rel=0.05)
  # Keys, values and scores of a layer or two, whatever is kept of them.
  layer = copies * slot / LAYERS * full.tokens / devices
  assert of_kept[0] < of_full[0] + 4 * layer
  assert of_kept[1] < of_full[1] + layer


@LIBTPU
@pytest.mark.slow
@pytest.mark.libtpu
def test_a_million_tokens_take_of_a_device_what_the_page_says():
  """The prefill is of a layer at a time, so that two tell what all take."""
  chips.prepare_libtpu()
  (case,) = (x for x in CASES if x.slice == "v5p-32" and x.tokens == 2**20)
  _, (temporary, _) = taken(case)
  whole = sizes(case.use, case.chip)
  most = whole.weights + whole.cache + temporary
  assert most < case.chip.hbm_bytes
  said = printed(case)["prefill, together"]
  assert most / 2**20 == pytest.approx(said, rel=0.01)
