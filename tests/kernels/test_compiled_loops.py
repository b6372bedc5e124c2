"""Turns of the loops of programs that are compiled for this machine."""

import jax
import jax.numpy as jnp

from kvjax.kernels.compiled.hlo import Module
from kvjax.kernels.compiled.loops import turns


def test_layers_of_a_program_for_this_machine_are_counted():
  """Here, what ends and continues a loop is fused."""

  def tokens(most, x):
    def layer(number, x):
      return jnp.sin(x) * number

    def token(step, x):
      return jax.lax.fori_loop(0, 7, layer, x)

    return jax.lax.fori_loop(0, most, token, x)

  compiled = jax.jit(tokens).lower(jnp.int32(3), jnp.ones(8)).compile()
  module = Module.of(compiled.as_text())
  found = [
    turns(module, own, each)
    for own in module.computations.values()
    for each in own.values()
    if each.opcode == "while"
  ]
  assert sorted(found, key=str) == [7, None]
