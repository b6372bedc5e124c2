"""The strictness that every other test relies on is really on."""

import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from kvjax.activations import Activations


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
