"""Kernels of other libraries beside ours, compiled for chips not there."""

import pathlib

import jax
import pytest
from made_up_chip import chip, footprint, program

from kvjax.experiments.compilation import peer_kernels, peer_table
from kvjax.experiments.compilation.programs import Outcome
from kvjax.experiments.report import page_parts
from kvjax.kernels.paged_attention.specs import SPECS

ROOT = pathlib.Path(__file__).parents[2]
TAKEN = footprint(results=0, overlap=0, kernels=("paged_attention",))


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_every_size_has_our_kernel_first_and_all_peers(platform):
  found = peer_table.programs_of(platform)
  peers = list(peer_kernels._PEERS[platform])
  paged = [x for x in found if "pages" in x.shapes]
  assert [(x.shapes, x.name) for x in paged] == [
    (spec.name, name) for spec in SPECS for name in ("paged_attention", *peers)
  ]
  stacked = [x.name for x in found if x not in paged]
  ours, *others = stacked or [peer_kernels.OURS_IN_STACKS]
  assert ours == peer_kernels.OURS_IN_STACKS
  assert others == (["JAX, decode_attention"] if platform == "gpu" else [])


def test_a_line_says_what_a_kernel_takes_or_why_it_is_none():
  own = program(name="paged_attention", shapes="4 pages")
  line = peer_table.line(Outcome(own, chip(), TAKEN))
  assert line == ("v5e", "4 pages", "kvjax", "3.0", "2.0", "5.0", "8.0")
  other = program(name="JAX, x", shapes="4 pages")
  refused = Outcome(other, chip(), fault="ValueError: no")
  line = peer_table.line(refused)
  assert line == ("v5e", "4 pages", "JAX, x", "`ValueError: no`", *"–––")


def test_the_page_has_every_line():
  """`make peer-kernels` writes them."""
  page = (ROOT / peer_table.PAGE).read_text(encoding="utf-8")
  assert page_parts.has(page, peer_table.PART)
  for platform, name in peer_table._CHIPS.items():
    for each in peer_table.programs_of(platform):
      kernel = "kvjax" if each.name in peer_table._OURS else each.name
      assert f"\n| {name} | {each.shapes} | {kernel} | " in page


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
  ("platform", "name"),
  [
    (platform, name)
    for platform, peers in peer_kernels._PEERS.items()
    for name in peers
    if name.startswith("JAX")
  ],
)
def test_results_of_a_part_of_the_pages_cannot_be_merged(platform, name):
  """A kernel of JAX that returns the log-sum-exp could replace ours."""
  peer = peer_kernels._PEERS[platform][name]
  cache = peer_kernels._shapes(SPECS[0].shapes, peer.joined)
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    (result,) = jax.tree.leaves(jax.eval_shape(peer.attend, cache))
  assert result.shape == cache.queries.shape
