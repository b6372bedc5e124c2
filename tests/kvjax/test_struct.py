"""Structs on the screen."""

import jax
import jax.numpy as jnp

import kvjax
from kvjax.struct import static, struct
from kvjax.testing import TinyModel


@struct
class Pair:
  """Arrays and a name."""

  arrays: tuple[jax.Array, ...]
  inner: "Pair | None" = None
  name: str = static(default="a")


def test_arrays_are_shown_by_dtype_and_shape():
  one = Pair((jnp.zeros((2, 3)),))
  inner = "Pair(arrays=(float32[2,3],), inner=None, name='a')"
  assert repr(one) == inner
  two = Pair((jnp.zeros(1, "int8"), jnp.zeros(())), one, name="b")
  shown = f"Pair(arrays=(int8[1], float32[]), inner={inner}, name='b')"
  assert repr(two) == shown
  traced = []
  jax.jit(lambda pair: traced.append(repr(pair)))(two)
  assert traced == [shown]


def test_a_cache_fits_on_a_screen():
  model = TinyModel()
  prompts = kvjax.Prompts.of([list(range(60))])
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(30))
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  assert repr(cache).startswith("Cache(stacks=(LayerCache(keys=float32[2,1,")
  assert len(repr(cache)) < 500


def test_structs_of_equal_shapes_are_equal_and_one_key():
  """Compiled programs are known by them."""
  shape = jax.ShapeDtypeStruct((3,), jnp.float32)
  one, other = Pair((shape,)), Pair((shape,))
  assert one == other
  assert len({one, other}) == 1
