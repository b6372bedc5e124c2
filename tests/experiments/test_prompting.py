"""Padded shapes of prompts."""

import jax
import pytest
from absl import flags
from processes import call_with_devices

from kvjax.experiments.run.prompting import QUERY_AWARE, Prompt, Shape


def shape_of(tokens, devices, protocol):
  """The shape of a prompt, on so many devices of the axis `context`."""
  prompt = Prompt([0] * tokens, [0] * 5, max_new_tokens=3)
  mesh = jax.sharding.AbstractMesh((devices,), ("context",))
  with jax.sharding.use_abstract_mesh(mesh):
    return Shape.of([prompt], 1, protocol)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("tokens", [1, 95, 320, 4_091, 131_000])
def test_devices_that_share_out_tokens_divide_the_shape(tokens, devices):
  shape = shape_of(tokens, devices, "query-agnostic")
  assert shape.context % devices == 0
  assert shape.question == 8
  # To 32 tokens of each device, or an eighth more.
  assert 0 <= shape.context - tokens <= max(32 * devices, tokens / 8)
  aware = shape_of(tokens, devices, QUERY_AWARE)
  assert aware.context % devices == aware.question == 0
  assert aware.context >= tokens + 5


@pytest.mark.parametrize(
  ("tokens", "devices", "padded"),
  # Splash attention takes multiples of 256 tokens on each device.
  [(131_000, 64, 131_072), (100_000, 8, 100_352), (1_000, 8, 1_024)],
)
def test_long_prompts_fill_the_blocks_of_a_kernel(tokens, devices, padded):
  assert shape_of(tokens, devices, "query-agnostic").context == padded


def planned_tokens(*arguments):
  """Tokens of a context that `kvjax plan` plans."""
  # Imported here, as it defines flags that other programs have, too.
  from kvjax.experiments import plan

  flags.FLAGS(["plan", *arguments])
  return plan._use().tokens


@pytest.mark.parametrize("devices", [1, 8, 40])
def test_plans_are_of_contexts_as_programs_pad_them(devices):
  given = (f"--mesh=context:{devices}", "--context=1001", "--answer=9")
  tokens = call_with_devices(1, planned_tokens, *given)
  assert tokens == shape_of(1001, devices, "query-agnostic").context
  assert tokens % devices == 0
