"""What kvjax makes of models of bonsai computes the same."""

import jax.numpy as jnp
import pytest
from adapted import GOLDEN, assert_same, tensors_of
from flax import nnx

from kvjax.errors import InputError
from kvjax.models.adapters import from_bonsai
from kvjax.models.pretrained import load


def module(**parts):
  """An nnx module with these parts."""
  made = nnx.Module()
  for name, part in parts.items():
    setattr(made, name, part)
  return made


def bonsai_model(name, kernel="kernel"):
  """A golden Qwen3 with the names and shapes of bonsai's.

  Args:
    name: of the golden model.
    kernel: what the matrices of heads and of the output are called.
  """
  config, tensors = load(GOLDEN / name).config, tensors_of(GOLDEN / name)
  heads = {"q": config.num_heads}
  heads |= dict.fromkeys("kv", config.num_kv_heads)

  def param(kind, name):
    return module(**{kind: nnx.Param(jnp.asarray(tensors[name]))})

  def layer(number):
    start = f"model.layers.{number}."
    attention = {
      f"{one}_norm": param("scale", f"{start}self_attn.{one}_norm.weight")
      for one in "qk"
    }
    for one in "qkvo":
      x = tensors[f"{start}self_attn.{one}_proj.weight"]
      split = (
        (-1, config.head_dim, config.hidden_size)
        if one == "o"
        else (config.hidden_size, heads[one], config.head_dim)
      )
      attention[f"{one}_proj"] = module(
        **{kernel: nnx.Param(jnp.asarray(x.reshape(split)))}
      )
    mlp = {
      f"{one}_proj": param("kernel", f"{start}mlp.{one}_proj.weight")
      for one in ("gate", "up", "down")
    }
    norms = {
      one: param("scale", f"{start}{one}.weight")
      for one in ("input_layernorm", "post_attention_layernorm")
    }
    return module(attn=module(**attention), mlp=module(**mlp), **norms)

  final_norm = param("scale", "model.norm.weight")
  epsilon = "epsilon" if kernel == "kernel" else "norm_eps"
  setattr(final_norm, epsilon, config.rms_norm_eps)
  return module(
    embedder=param("embedding", "model.embed_tokens.weight"),
    layers=nnx.List([layer(number) for number in range(config.num_layers)]),
    final_norm=final_norm,
    lm_head=param(kernel, "lm_head.weight"),
  )


def test_a_model_of_bonsai_is_the_model_that_it_was_made_of():
  golden, model = load(GOLDEN / "qwen3", "float32"), bonsai_model("qwen3")
  lm = from_bonsai(model, max_positions=golden.config.max_positions)
  assert_same(lm, golden)
  # What layers do not stack is no copy.
  for own, one in (
    (lm.params["embed_tokens"]["embedding"], model.embedder.embedding),
    (lm.params["lm_head"]["kernel"], model.lm_head.kernel),
  ):
    assert own[...].unsafe_buffer_pointer() == one[...].unsafe_buffer_pointer()


def test_bonsai_stores_tied_weights_twice():
  model = bonsai_model("qwen3")
  untied = from_bonsai(model)
  model.lm_head.kernel = nnx.Param(model.embedder.embedding[...].T)
  tied = from_bonsai(model)
  assert tied.config.tie_embeddings
  assert not untied.config.tie_embeddings
  assert "lm_head" not in tied.params


def test_matrices_of_older_models_are_called_w():
  golden, model = load(GOLDEN / "qwen3", "float32"), bonsai_model("qwen3", "w")
  assert_same(
    from_bonsai(model, max_positions=golden.config.max_positions), golden
  )


def test_other_modules_are_refused():
  model = bonsai_model("qwen3")
  flat = nnx.Param(model.layers[0].attn.q_proj.kernel[...].reshape(-1))
  model.layers[0].attn.q_proj.kernel = flat
  with pytest.raises(InputError, match="q_proj/kernel has the shape"):
    from_bonsai(model)
  with pytest.raises(InputError, match="Module without it"):
    from_bonsai(
      module(
        embedder=model.embedder, lm_head=model.lm_head, final_norm=module()
      )
    )
