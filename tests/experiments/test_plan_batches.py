"""The largest batch of a slice, along a line through two."""

import dataclasses

import pytest
from plans_here import planned

from kvjax.experiments.planning import batches
from kvjax.experiments.planning.compiling import Needs


def test_the_largest_batch_is_on_the_line_through_two():
  found = batches.largest(planned(1), planned(2))
  assert found == ((10_000 - 2_000) // 900, (10_000 - 2_000) // 600)
  # From 3 rows on, another program needs 2,000 bytes more.
  beyond = 3, Needs(2_300, 0, {})
  assert batches.largest(planned(1), planned(2), beyond) == (
    (10_000 - 2_000) // 900,
    (10_000 - 2_000 - 2_000) // 600,
  )
  # In multiples of the devices that share out rows.
  line = batches.Line.through((2, 4), (3_000, 4_000))
  assert line == (2_000, 500)
  assert line.most(10_000, 4) == 16
  assert line.most(1_999, 4) == 0
  # What does not grow does not shrink either.
  assert batches.Line.through((2, 4), (4_000, 3_000)) == (4_000, 0)


# The rows and bytes of the larger of two batches, of the least that another
# program decodes, and the most rows of 500 bytes each in 4,000.
DECODED = {
  # It needs 100 for each row besides 1,600, then 3,000, or the same for all.
  "by a line of its own": ((4, 2_000), (3, 1_900), 4),
  "none by its line": ((4, 3_400), (3, 3_300), 2),
  "level": ((8, 1_000), (4, 1_000), 6),
  # As the first one, 50 for each.
  "from one batch": ((4, 1_000), (4, 1_000), 5),
  # As many as the first one decodes: 550 for each.
  "too large": ((8, 9_000), (8, 9_000), 7),
  "too large beyond": ((4, 9_000), (4, 9_000), 3),
}


@pytest.mark.parametrize("case", DECODED)
def test_the_largest_batch_is_of_the_program_that_decodes_it(case):
  (large_rows, large_bytes), (rows, nbytes), most = DECODED[case]
  small, large = planned(2, hbm=6_000), planned(large_rows, hbm=6_000)
  small, large = (
    dataclasses.replace(each, decode=Needs(temporary, 0, {}))
    for each, temporary in ((small, 100), (large, large_bytes))
  )
  found = batches.largest(small, large, (rows, Needs(nbytes, 0, {})))
  assert found.decode == most
