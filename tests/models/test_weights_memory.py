"""What hosts need of memory to read a checkpoint of four files."""

import json
import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from two_hosts import call

from kvjax.cache.sharding import parse_mesh
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder
from kvjax.models.pretrained import Pretrained, load, load_decoder
from kvjax.models.saving import save

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
SIZES = dict(
  hidden_size=256,
  num_hidden_layers=8,
  intermediate_size=1024,
  vocab_size=1024,
  num_attention_heads=8,
  num_key_value_heads=4,
  head_dim=32,
)
# The largest tensor of a file, in float32: a matrix of the MLP.
TENSOR = 256 * 1024 * 4
# Of Python and of compiling.
SLACK = 3 * TENSOR // 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  target = tmp_path_factory.mktemp("four") / "model"
  fields = json.loads((GOLDEN / "llama31" / "config.json").read_text())
  config = DecoderConfig.from_hf(fields | SIZES)
  model, template = from_decoder(
    nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), template
  )
  nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  save(Pretrained(model, params), target, nbytes // 4 + TENSOR)
  assert len(list(target.glob("*.safetensors"))) == 4
  return target


def measure(directory, mesh):
  """Bytes of a host's part of the weights, and those it took at most.

  Arrays of NumPy are traced, and those of JAX's CPU devices as far as they are
  the same memory.
  """
  # What reading imports.
  load_decoder(GOLDEN / "llama31", "float32", mesh)
  tracemalloc.start()
  _, params = load_decoder(directory, "float32", mesh)
  held, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  # Devices with equal parts share one memory.
  parts = {
    shard.data.unsafe_buffer_pointer(): shard.data.nbytes
    for leaf in jax.tree.leaves(params)
    for shard in leaf.addressable_shards
  }
  share = sum(parts.values())
  # All weights are traced: none was copied.
  assert share <= held <= share + SLACK
  return share, peak


def test_a_host_needs_its_weights_and_one_tensor(directory):
  share, peak = measure(directory, None)
  assert share > 30 * TENSOR
  assert peak <= share + TENSOR + SLACK


def measure_host(directory):
  """Runs on each of two hosts, with two devices each."""
  devices = np.asarray(jax.devices()).reshape(1, 4)
  assert len(jax.local_devices()) == 2
  mesh = Mesh(devices, ("data", "model"))
  both = [
    load_decoder(place, "float32", mesh)[1]
    for place in (directory, f"{directory}.orbax")
  ]
  # A host reads its parts of a checkpoint of orbax, too.
  for one, other in zip(*map(jax.tree.leaves, both), strict=True):
    assert one.sharding == other.sharding
    assert not one.is_fully_addressable
    for x, y in zip(
      one.addressable_shards, other.addressable_shards, strict=True
    ):
      np.testing.assert_array_equal(x.data, y.data)
  return measure(directory, mesh)


def test_each_of_two_hosts_needs_its_part_and_one_tensor(directory):
  # Saved by one host, under another mesh.
  lm = load(directory, "float32", parse_mesh("data:2,model:2"))
  save(lm, f"{directory}.orbax", format="orbax")
  measured = call(measure_host, str(directory))
  _, params = load_decoder(directory, "float32")
  whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  for share, peak in measured:
    # All but norms are shared out.
    assert share < whole / 2 + TENSOR / 2
    assert peak <= share + TENSOR + SLACK
