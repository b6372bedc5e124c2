"""The strictness that every other test relies on is really on."""

import pathlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from kvjax.activations import Activations

ROOT = pathlib.Path(__file__).parent


def test_there_are_four_devices():
  assert jax.device_count() == 4


def test_dtypes_are_not_promoted():
  with pytest.raises(jax.dtypes.TypePromotionError):
    jnp.ones(2) + jnp.ones(2, jnp.int32)


def test_ranks_are_not_promoted():
  with pytest.raises(ValueError, match="rank_promotion"):
    jnp.ones(2) + jnp.ones((2, 2))


def test_warnings_are_errors():
  with pytest.raises(UserWarning, match="ouch"):
    warnings.warn("ouch", UserWarning, stacklevel=1)


def test_shapes_are_checked():
  block = jnp.ones((1, 2, 3, 4))
  Activations(block, block, block, jnp.ones((1, 3), jnp.int32))
  with pytest.raises(TypeCheckError):
    Activations(block, block, block, jnp.ones((1, 5), jnp.int32))


def test_programs_that_tests_start_are_strict_too():
  code = (
    "import jax; print(jax.device_count(), jax.numpy_dtype_promotion.value)"
  )
  printed = subprocess.check_output([sys.executable, "-c", code], text=True)
  assert printed.split() == ["4", "strict"]


def test_quick_cases_name_some_cases_of_tests_that_there_are(
  quick_cases, case_counts, request
):
  """Of the files that were collected as a whole."""
  if any("::" in argument for argument in request.config.args):
    pytest.skip("single tests were asked for")
  collected = {file for file, _, _ in case_counts}
  for file, tests in quick_cases.items():
    assert (ROOT / file).is_file()
    for name in tests if file in collected else ():
      assert case_counts[file, name, True] > 0, (file, name)
      assert case_counts[file, name, False] > 0, (file, name)
