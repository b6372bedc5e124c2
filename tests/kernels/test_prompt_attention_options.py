"""Options of the attention of whole prompts, against loops in float64."""

import functools
import math
import re

import jax
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask_info as mask_info,
)
from jax.sharding import AxisType
from plain_attention import (
  DECLINED,
  OPTIONS,
  SOME,
  assert_declined,
  assert_prompts,
  most_of,
  on_tpu,
  prompts,
  sinks_of,
)

from kvjax import kernels
from kvjax.cache.sharding import parse_mesh
from kvjax.kernels.attention import AttentionOptions
from kvjax.kernels.prompt_attention import neighbors, prompt_attention, tpu


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", SOME)
def test_prompt_attention(name):
  operands, sinks = prompts(4, 2, 47, 8, 12, lengths=(20, 47)), sinks_of(4)
  run = functools.partial(
    prompt_attention, options=OPTIONS[name], sinks=sinks_of(4)
  )
  assert_prompts(jax.jit(run)(*operands), operands, OPTIONS[name], sinks)


@pytest.mark.parametrize(
  ("options", "sinks", "dtype", "W"),
  [
    (AttentionOptions(window=1), False, "float32", 64),
    (AttentionOptions(window=40, scale=0.2), True, "float32", 64),
    (AttentionOptions(window=129, softcap=2.0), False, "float32", 128),
    (AttentionOptions(softcap=5.0, scale=0.1), True, "bfloat16", 32),
  ],
)
def test_splash_attention(chosen, options, sinks, dtype, W):
  chosen({"prompt_attention/tpu": {"block": 128}})
  operands = prompts(4, 2, 147, 64, W, dtype)
  sinks = sinks_of(4) if sinks else None
  run = functools.partial(prompt_attention, options=options, sinks=sinks)
  with on_tpu():
    actual = jax.jit(run)(*operands)
  assert actual.dtype == dtype
  # In bfloat16 scaled queries are rounded besides weights and output: a logit,
  # below 5 in size, by 5 * 2^-9, and a weight by twice as much.
  tolerance = 3e-2 if dtype == "bfloat16" else 1e-5
  assert_prompts(actual, operands, options, sinks, tolerance)


def test_every_device_of_a_mesh_has_the_sinks_of_its_heads():
  mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)
  operands = prompts(4, 2, 20, 64, 64, lengths=(9, 20))
  sinks, options = sinks_of(4), AttentionOptions(window=6)
  run = functools.partial(prompt_attention, options=options)
  with on_tpu(), jax.set_mesh(mesh):
    actual = jax.jit(lambda *x: run(*x[:-1], sinks=x[-1]))(*operands, sinks)
  assert_prompts(actual, operands, options, sinks)


@pytest.mark.parametrize(
  ("mesh", "length", "window"),
  [
    # 121 is the window that reaches over half of 240 tokens; wider ones see
    # what all devices have.
    *(("context:4", 240, window) for window in (1, 2, 60, 61, 62, 121, 122)),
    ("context:4", 220, 57),
    ("context:2,model:2", 240, 30),
    ("data:2,context:2", 240, 121),
  ],
)
def test_windows_see_tokens_of_the_devices_before(mesh, window, length):
  lengths = (length, 151)
  operands, sinks = prompts(4, 2, length, 8, 12, lengths=lengths), sinks_of(4)
  options = AttentionOptions(window=window)
  run = functools.partial(prompt_attention, options=options, sinks=sinks)
  with jax.set_mesh(parse_mesh(mesh)):
    actual = jax.jit(run)(*operands)
  assert_prompts(actual, operands, options, sinks)


@pytest.mark.parametrize(
  ("mesh", "length", "block", "window"),
  [
    ("context:2", 512, 128, 100),
    ("context:4", 1024, 128, 300),
    ("context:4", 1536, 512, 512),
  ],
)
def test_splash_attention_to_tokens_of_the_devices_before(
  chosen, mesh, length, block, window
):
  chosen({"prompt_attention/tpu": {"block": block}})
  operands = prompts(1, 1, length, 64, 64, lengths=(length,))
  options = AttentionOptions(window=window)
  run = functools.partial(prompt_attention, options=options, sinks=sinks_of(1))
  with on_tpu(), jax.set_mesh(parse_mesh(mesh)):
    actual = jax.jit(run)(*operands)
  assert_prompts(actual, operands, options, sinks_of(1))


@pytest.mark.parametrize("block", [512, 1024])
@pytest.mark.parametrize("own", range(128, 1408, 128))
def test_what_devices_receive_are_blocks_of_the_kernel(chosen, own, block):
  chosen({"prompt_attention/tpu": {"block": block}})
  for window in (2, 128, 129, 512, 513, 1024):
    before = neighbors.tokens_before(window, 16 * own, 16)
    assert window - 1 <= before < window - 1 + block
    # As `tpu.py` has it, for narrow heads and for wide ones.
    for size in (block, min(block, tpu.WIDE_BLOCK)):
      assert before % math.gcd(own, min(size, own)) == 0


def test_one_device_of_the_axis_attends_alone():
  mesh = jax.make_mesh(
    (1, 1, 1), ("data", "context", "model"), (AxisType.Auto,) * 3
  )
  operands = prompts(2, 1, 40, 8, 8, lengths=(40, 20))
  options = AttentionOptions(window=1)
  run = functools.partial(prompt_attention, options=options)
  with jax.set_mesh(mesh):
    actual = jax.jit(run)(*operands)
  assert_prompts(actual, operands, options)


@pytest.mark.parametrize("longer", [1, 2])
@pytest.mark.parametrize("window", [1, 2, 128, 129, 130, 257, 600, 5000])
def test_blocks_of_windows_are_what_splash_attention_finds(window, longer):
  tokens, sizes = 6 * 128, (128, 128 * longer)
  mask = masks.LocalMask((tokens, tokens), (window - 1, 0), 0)
  wanted, _ = mask_info.process_mask(masks.MultiHeadMask([mask] * 2), sizes)
  actual = tpu.causal_blocks(tokens, sizes, window)
  for ours, theirs in zip(actual, wanted, strict=True):
    assert (ours is None) == (theirs is None)
    if ours is not None:
      np.testing.assert_array_equal(ours, theirs)


@pytest.fixture
def cudnn_there(monkeypatch):
  """As on a Hopper GPU that is not there."""
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
  monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)


@pytest.mark.usefixtures("cudnn_there")
def test_cudnn_is_told_scale_and_window():
  operands = prompts(4, 2, 139, 64, 64, "bfloat16")
  options = AttentionOptions(window=17, scale=0.3)
  run = functools.partial(prompt_attention, options=options)
  with kernels.use("pallas", "gpu"):
    traced = jax.jit(run).trace(*operands)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
  (call,) = re.findall(r"custom_call @__cudnn\$fmha.*", lowered)
  assert re.search(r"mask_type\\22: \\22CAUSAL\\22", call)
  assert float(re.search(r"fmha_scale\\22: ([\d.]+)", call)[1]) == 0.3
  assert re.search(r"sliding_window_length\\22: (\d+)", call)[1] == "17"


@pytest.mark.usefixtures("cudnn_there")
@pytest.mark.parametrize("reason", DECLINED)
def test_cudnn_declines_what_it_does_not_know(reason):
  options, sinks, W = DECLINED[reason]
  operands = prompts(2, 1, 20, 64, W, "bfloat16", lengths=(9, 20))
  sinks = sinks_of(2) if sinks else None
  run = jax.jit(lambda *x: prompt_attention(*x, options=options, sinks=sinks))
  if options.window or options.scale:
    with kernels.use("pallas", "gpu"):
      assert jax.eval_shape(run, *operands).shape == (2, 2, 20, 64)
    return
  assert_declined(
    "gpu",
    reason,
    lambda: run(*operands),
    lambda actual: assert_prompts(
      actual, operands, options, sinks, 3 * 2**-9 * most_of(operands[2])
    ),
  )
