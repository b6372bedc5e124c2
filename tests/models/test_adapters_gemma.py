"""What kvjax makes of models of gm computes the same."""

import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import GOLDEN, TOLERANCE, assert_same, last_logits, put, tensors_of

from kvjax.errors import InputError
from kvjax.models.adapters import from_gemma
from kvjax.models.pretrained import load


def gemma_config(config, factor):
  """The config of gm for a golden Gemma 3."""
  kinds = [config.kinds[kind].window for kind in config.layer_kinds]
  return types.SimpleNamespace(
    num_embed=config.vocab_size,
    embed_dim=config.hidden_size,
    hidden_dim=config.intermediate_size,
    num_heads=config.num_heads,
    head_dim=config.head_dim,
    num_kv_heads=config.num_kv_heads,
    final_logit_softcap=None,
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    use_qk_norm=True,
    attention_types=[
      types.SimpleNamespace(name="LOCAL_SLIDING" if window else "GLOBAL")
      for window in kinds
    ],
    query_pre_attn_scalar=lambda: config.attention_scale,
    attn_logits_soft_cap=None,
    sliding_window_size=max(window or 0 for window in kinds),
    transpose_gating_einsum=True,
    local_base_frequency=10_000,
    global_base_frequency=1_000_000,
    local_scale_factor=1.0,
    global_scale_factor=factor,
  )


GEMMA_LAYER = {
  "pre_attention_norm/scale": "input_layernorm",
  "post_attention_norm/scale": "post_attention_layernorm",
  "pre_ffw_norm/scale": "pre_feedforward_layernorm",
  "post_ffw_norm/scale": "post_feedforward_layernorm",
  "attn/_query_norm/scale": "self_attn.q_norm",
  "attn/_key_norm/scale": "self_attn.k_norm",
  "mlp/linear": "mlp.down_proj",
}


def gemma_tree(config, tensors):
  """A golden model as gm stores it."""
  tree = {}
  put(tree, "embedder/input_embedding", tensors["model.embed_tokens.weight"])
  put(tree, "final_norm/scale", tensors["model.norm.weight"])
  # Of the vision encoder, which is left out.
  put(tree, "embedder/mm_soft_embedding_norm/scale", np.ones(3))
  put(tree, "vision_encoder/kernel", np.ones(3))
  for number in range(config.num_layers):
    start, own = f"model.layers.{number}.", f"layer_{number}/"
    for path, name in GEMMA_LAYER.items():
      put(tree, own + path, tensors[f"{start}{name}.weight"])
    q, k, v, o = (
      tensors[f"{start}self_attn.{one}_proj.weight"] for one in "qkvo"
    )
    q, k, v = (
      x.reshape(config.hidden_size, -1, config.head_dim).swapaxes(0, 1)
      for x in (q, k, v)
    )
    put(tree, f"{own}attn/q_einsum/w", q)
    put(tree, f"{own}attn/kv_einsum/w", np.stack([k, v]))
    o = o.reshape(-1, config.head_dim, config.hidden_size)
    put(tree, f"{own}attn/attn_vec_einsum/w", o)
    gate, up = (
      tensors[f"{start}mlp.{one}_proj.weight"].T for one in ("gate", "up")
    )
    put(tree, f"{own}mlp/gating_einsum", np.stack([gate, up]))
  return tree


def test_parameters_of_gm_are_the_model_that_they_were_made_of(tmp_path):
  """Its norms have an epsilon of 1e-6, and its context follows from RoPE."""
  shutil.copytree(GOLDEN / "gemma3", tmp_path / "model")
  path = tmp_path / "model" / "config.json"
  fields = json.loads(path.read_text()) | {"rms_norm_eps": 1e-6}
  path.write_text(json.dumps(fields | {"max_position_embeddings": 131_072}))
  golden = load(tmp_path / "model", "float32")
  tree = gemma_tree(golden.config, tensors_of(tmp_path / "model"))
  model = types.SimpleNamespace(config=gemma_config(golden.config, 8.0))
  assert_same(from_gemma(model, tree), golden)
  model.config.use_qk_norm = False
  with pytest.raises(InputError, match="this config is another's"):
    from_gemma(model, tree)


# The package and what it imports warn of their own.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
  ("kv_heads", "transposed", "factor", "softcap"),
  [(2, True, 8.0, None), (4, False, 1.0, None), (1, True, 1.0, 5.0)],
)
def test_gm_computes_the_same_logits(kv_heads, transposed, factor, softcap):
  """Past the window, with random weights."""
  pytest.importorskip("gemma")
  from gemma.gm import nn

  local, everywhere = nn.AttentionType.LOCAL_SLIDING, nn.AttentionType.GLOBAL
  config = nn.config.TransformerConfig(
    num_embed=80,
    embed_dim=32,
    hidden_dim=48,
    num_heads=4,
    head_dim=16,
    num_kv_heads=kv_heads,
    final_logit_softcap=softcap,
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    attention_types=(local, local, everywhere) * 2 + (local,),
    sliding_window_size=12,
    transpose_gating_einsum=transposed,
    use_qk_norm=True,
    local_base_frequency=10_000,
    global_base_frequency=1_000_000,
    global_scale_factor=factor,
  )
  model = nn.Transformer(config=config, dtype=jnp.float32)
  draw = np.random.default_rng(0)
  tokens = draw.integers(3, 80, (2, 40)).astype(np.int32)
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    params = jax.tree.map(
      lambda x: jnp.asarray(draw.normal(size=x.shape) * 0.3, jnp.float32),
      model.init(jax.random.key(0), tokens)["params"],
    )
    expected = model.apply({"params": params}, tokens).logits
  lm = from_gemma(model, params)
  for length in (5, 12, 13, 40):
    logits = last_logits(lm, [row[:length].tolist() for row in tokens])
    np.testing.assert_allclose(logits, expected[:, length - 1], atol=TOLERANCE)
