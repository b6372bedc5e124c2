"""Memory that is short, in a sentence."""

import jax.numpy as jnp
import pytest

from kvjax.experiments import help_pages
from kvjax.experiments.run import device_failures

NUMBERS = 2**50


@pytest.mark.parametrize(
  ("own", "advice"),
  [
    (
      {"model", "batch", "length"},
      "; a smaller --batch or --length takes less",
    ),
    ({"model"}, ""),
  ],
)
def test_memory_that_a_device_lacks_names_the_flags_of_sizes(
  own, advice, monkeypatch
):
  monkeypatch.setattr(help_pages, "own_flags", lambda: frozenset(own))
  with pytest.raises(Exception, match="RESOURCE_EXHAUSTED") as raised:
    jnp.zeros(NUMBERS, jnp.float32).block_until_ready()
  said = device_failures.of_memory(raised.value)
  assert said.startswith("There is too little memory for this (RESOURCE")
  assert f"{4 * NUMBERS} bytes" in said
  assert said.endswith(f"){advice}.")
  # JAX raises errors of its own in place of others.
  outer = ValueError("cannot run")
  outer.__cause__ = MemoryError()
  assert device_failures.of_memory(outer) == (
    f"There is too little memory for this{advice}."
  )


@pytest.mark.parametrize(
  "said", ["MemoryError is a word", "RESOURCE_EXHAUSTED: the store's quota"]
)
def test_other_errors_are_not_about_memory(said):
  assert device_failures.of_memory(ValueError(said)) is None
