"""Models of other libraries: what kvjax makes of them computes the same."""

import dataclasses
import json
import pathlib
import shutil
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import nnx

import kvjax
import kvjax.testing
from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.models.adapters import (
  ADAPTERS,
  from_bonsai,
  from_gemma,
  from_keras_hub,
  from_maxtext,
)
from kvjax.models.adapters.maxtext_names import convert
from kvjax.models.families import FAMILIES
from kvjax.models.pretrained import load

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
TOLERANCE = 1e-4
# The layout of MaxText, by golden model: the period of its blocks of layers.
MAXTEXT = {
  "llama3": 0,
  "llama31": 0,
  "mistral": 0,
  "qwen25": 0,
  "qwen25_tied": 0,
  "qwen3": 0,
  "gpt_oss": 2,
  "gemma3": 6,
  "olmo3": 4,
}


def last_logits(lm, rows):
  plan = kvjax.get_plan("full", kvjax.Retention(1.0))
  return kvjax.prefill(lm.model, lm.params, kvjax.Prompts.of(rows), plan)[1]


def rows_of(vocabulary):
  """Longer than the windows of the golden models."""
  draw = np.random.default_rng(0)
  return [draw.integers(3, vocabulary, n).tolist() for n in (30, 17)]


def assert_same(lm, other):
  """The same decoder with the same weights, and the same logits."""
  assert lm.model == other.model
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7),
    lm.params,
    other.params,
  )
  rows = rows_of(lm.config.vocab_size)
  np.testing.assert_allclose(
    last_logits(lm, rows), last_logits(other, rows), atol=TOLERANCE
  )


def tensors_of(folder):
  """Matrices as [in, out], by the names in the files."""
  return {
    name: x.T if x.ndim == 2 and "embed_tokens" not in name else x
    for path in folder.glob("*.safetensors")
    for name, x in safetensors.numpy.load_file(path).items()
  }


def put(tree, path, value):
  *folders, last = path.split("/")
  for folder in folders:
    tree = tree.setdefault(folder, {})
  tree[last] = value


# Names in a layer of MaxText and at Hugging Face.
MAXTEXT_LAYER = {
  "pre_self_attention_layer_norm/scale": "input_layernorm.weight",
  "post_self_attention_layer_norm/scale": "post_attention_layernorm.weight",
  "post_mlp_layer_norm/scale": "post_feedforward_layernorm.weight",
  "{attention}/query/kernel": "self_attn.q_proj.weight",
  "{attention}/key/kernel": "self_attn.k_proj.weight",
  "{attention}/value/kernel": "self_attn.v_proj.weight",
  "{attention}/out/kernel": "self_attn.o_proj.weight",
  "{attention}/query/bias": "self_attn.q_proj.bias",
  "{attention}/key/bias": "self_attn.k_proj.bias",
  "{attention}/value/bias": "self_attn.v_proj.bias",
  "{attention}/out/bias": "self_attn.o_proj.bias",
  "{attention}/query_norm/scale": "self_attn.q_norm.weight",
  "{attention}/key_norm/scale": "self_attn.k_norm.weight",
  "{attention}/sinks": "self_attn.sinks",
  "mlp/wi_0/kernel": "mlp.gate_proj.weight",
  "mlp/wi_1/kernel": "mlp.up_proj.weight",
  "mlp/wo/kernel": "mlp.down_proj.weight",
  "GptOssMlp/gate/kernel": "mlp.router.weight",
  "GptOssMlp/gate/bias": "mlp.router.bias",
  "GptOssMlp/wo": "mlp.experts.down_proj",
  "GptOssMlp/wo_bias": "mlp.experts.down_proj_bias",
}
GEMMA_NORMS = {
  "pre_self_attention_norm/scale": "input_layernorm.weight",
  "post_self_attention_norm/scale": "post_attention_layernorm.weight",
  "pre_ffw_norm/scale": "pre_feedforward_layernorm.weight",
  "post_ffw_norm/scale": "post_feedforward_layernorm.weight",
}
ATTENTION = {"gpt_oss": "GptOssAttention", "olmo3": "attention"}


def maxtext_layer(config, tensors, layer):
  """A layer in MaxText's layout, by path."""
  kind = config.model_type
  names = MAXTEXT_LAYER
  if kind == "gemma3_text":
    names = {k: v for k, v in names.items() if "layer_norm" not in k}
    names |= GEMMA_NORMS
  found = {}
  for path, name in names.items():
    value = tensors.get(f"model.layers.{layer}.{name}")
    if value is None:
      continue
    path = path.format(attention=ATTENTION.get(kind, "self_attention"))
    if "/out/kernel" in path:
      value = value.reshape(-1, config.head_dim, config.hidden_size)
    elif any(f"/{one}/" in path for one in ("query", "key", "value")):
      value = value.reshape(*value.shape[:-1], -1, config.head_dim)
    if kind == "llama" and "/query/kernel" in path:
      value = value / np.sqrt(config.head_dim)
    if config.rope.kind == "llama3" and ("/query/" in path or "/key/" in path):
      halves = np.split(value, 2, axis=-1)
      value = np.stack(halves, axis=-1).reshape(value.shape)
    if kind == "gemma3_text" and path.endswith("scale"):
      value = value + 1
    if kind == "mistral" and "/query/kernel" in path:
      value = value / np.sqrt(config.head_dim)
    found[path] = value.astype(np.float32)
  both = tensors.get(f"model.layers.{layer}.mlp.experts.gate_up_proj")
  if both is not None:
    bias = tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj_bias"]
    for number in range(2):
      found[f"GptOssMlp/wi_{number}"] = both[..., number::2]
      # `tensors_of` has transposed it: it is a matrix.
      found[f"GptOssMlp/wi_{number}_bias"] = bias.T[..., number::2]
    found["GptOssMlp/wo_bias"] = found["GptOssMlp/wo_bias"].T
  return found


def maxtext_tree(name, config, scanned):
  """A golden model as MaxText stores it."""
  tensors, tree = tensors_of(GOLDEN / name), {}
  embedding = tensors["model.embed_tokens.weight"]
  scale = np.float32(1)
  if config.model_type == "gemma3_text":
    scale = np.float32(jnp.bfloat16(np.sqrt(config.hidden_size)))
  put(tree, "token_embedder/embedding", embedding * scale)
  offset = config.model_type == "gemma3_text"
  put(tree, "decoder/decoder_norm/scale", tensors["model.norm.weight"] + offset)
  if "lm_head.weight" in tensors:
    put(tree, "decoder/logits_dense/kernel", tensors["lm_head.weight"])
  layers = [maxtext_layer(config, tensors, n) for n in range(config.num_layers)]
  period = MAXTEXT[name] or 1
  whole = config.num_layers - config.num_layers % period
  for number, layer in enumerate(layers):
    for path, value in layer.items():
      if not scanned:
        put(tree, f"decoder/layers_{number}/{path}", value)
      elif number >= whole:
        rest = f"decoder/layers_remainder/layers_{number - whole}/{path}"
        put(tree, rest, value)
      elif number < period:
        block = f"layers_{number}/" if MAXTEXT[name] else ""
        stack = [own[path] for own in layers[number:whole:period]]
        put(tree, f"decoder/layers/{block}{path}", np.stack(stack, axis=1))
  return tree


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", MAXTEXT)
def test_trees_of_maxtext_are_the_models_that_they_were_made_of(name, scanned):
  golden = load(GOLDEN / name, "float32")
  tree = maxtext_tree(name, golden.config, scanned)
  # As a state of training has it.
  lm = from_maxtext({"params": {"params": tree}}, golden.config)
  assert_same(lm, golden)


def test_every_family_of_maxtext_is_tried():
  tried = {load(GOLDEN / name).config.model_type for name in MAXTEXT}
  # test_maxtext_experts does the last one.
  assert {*tried, "qwen3_moe"} == set(ADAPTERS["MaxText"].families)


def test_experts_of_maxtext(tmp_path):
  """Of Qwen3, with experts in all layers, which are scanned after them."""
  shutil.copytree(GOLDEN / "qwen3_moe_shares", tmp_path / "model")
  golden = load(GOLDEN / "qwen3_moe_shares", "float32")
  config = golden.config
  sparse = [config.kinds[kind].sparse for kind in config.layer_kinds]
  keep = sparse.index(True)
  fields = json.loads((tmp_path / "model" / "config.json").read_text())
  fields |= {"num_hidden_layers": 1, "decoder_sparse_step": 1}
  (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
  path = tmp_path / "model" / "model.safetensors"
  files = safetensors.numpy.load_file(path)
  start = f"model.layers.{keep}."
  kept = {
    name.replace(start, "model.layers.0."): x
    for name, x in files.items()
    if not name.startswith("model.layers.") or name.startswith(start)
  }
  safetensors.numpy.save_file(kept, path, {"format": "pt"})
  golden = load(tmp_path / "model", "float32")
  tensors = tensors_of(tmp_path / "model")
  tree = {}
  put(tree, "token_embedder/embedding", tensors["model.embed_tokens.weight"])
  put(tree, "decoder/decoder_norm/scale", tensors["model.norm.weight"])
  put(tree, "decoder/logits_dense/kernel", tensors["lm_head.weight"])
  layer = maxtext_layer(golden.config, tensors, 0)
  layer["moe_block/gate/kernel"] = tensors["model.layers.0.mlp.gate.weight"]
  for own, name in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
    layer[f"moe_block/{own}"] = np.stack(
      [
        tensors[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"]
        for expert in range(golden.config.experts.count)
      ]
    )
  for path, value in layer.items():
    put(tree, f"decoder/layers/{path}", value[:, None])
  assert_same(from_maxtext(tree, golden.config), golden)


def test_a_checkpoint_of_maxtext_is_read_from_its_folder(tmp_path):
  """Parameters alone: the state of the optimizer stays on the disk."""
  golden = load(GOLDEN / "qwen3", "float32")
  tree = maxtext_tree("qwen3", golden.config, scanned=True)
  # And what training stores besides.
  state = {
    "params": {"params": tree},
    "opt_state": {"mu": np.zeros(3, np.float32)},
    "step": np.int32(7),
  }
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "0" / "items", state)
  for folder in (tmp_path / "0", tmp_path / "0" / "items"):
    assert_same(from_maxtext(folder, golden.config), golden)
  with pytest.raises(InputError, match="no checkpoint of MaxText that orbax"):
    from_maxtext(tmp_path / "absent", golden.config)


@pytest.mark.parametrize("name", ["qwen25_tied", "qwen3"])
def test_a_padded_vocabulary_is_cut(name):
  """That of the embedding, and of an output matrix of its own."""
  golden = load(GOLDEN / name, "float32")
  tree = maxtext_tree(name, golden.config, scanned=True)
  embedder, decoder = tree["token_embedder"], tree["decoder"]
  padding = ((0, 48), (0, 0))
  embedder["embedding"] = np.pad(embedder["embedding"], padding)
  if not golden.config.tie_embeddings:
    output = decoder["logits_dense"]
    output["kernel"] = np.pad(output["kernel"], padding[::-1])
  assert ("logits_dense" in decoder) == (name == "qwen3")
  assert_same(from_maxtext(tree, golden.config), golden)


def test_a_mesh_has_shares_of_the_parameters():
  golden = load(GOLDEN / "qwen3", "float32")
  tree = maxtext_tree("qwen3", golden.config, scanned=True)
  mesh = parse_mesh("model:4")
  lm = from_maxtext(tree, golden.config, mesh=mesh)
  up = lm.params["layers"][0]["mlp"]["up_proj"]["kernel"][...]
  assert up.addressable_shards[0].data.shape[-1] == up.shape[-1] // 4
  with jax.set_mesh(mesh):
    assert_same(lm, golden)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["llama31", "gemma3"])
def test_parameters_go_to_devices_once(monkeypatch, name, sharded):
  """From the host, whole, and to where they belong."""
  golden = load(GOLDEN / name, "float32")
  tree = maxtext_tree(name, golden.config, scanned=True)
  put_there, sent = jax.device_put, []

  def device_put(array, place):
    assert isinstance(array, np.ndarray)
    sent.append(array.size)
    return put_there(array, place)

  monkeypatch.setattr(jax, "device_put", device_put)
  # What else makes arrays of JAX of arrays of the host.
  for function in ("asarray", "array", "stack"):
    monkeypatch.delattr(jnp, function)
  mesh = parse_mesh("model:4") if sharded else None
  lm = from_maxtext(tree, golden.config, mesh=mesh)
  assert sorted(sent) == sorted(x.size for x in jax.tree.leaves(lm.params))


@pytest.mark.parametrize("name", ["llama31", "gemma3"])
def test_parameters_on_devices_stay_there(name):
  golden = load(GOLDEN / name, "float32")
  tree = maxtext_tree(name, golden.config, scanned=True)
  lm = from_maxtext(jax.tree.map(jnp.asarray, tree), golden.config)
  assert_same(lm, golden)


def test_what_maxtext_does_not_change_is_not_copied():
  config = load(GOLDEN / "gemma3", "float32").config
  kernel = np.ones((64, 1024), jnp.bfloat16)
  tracemalloc.start()
  converted = convert(config, "mlp.up_proj.kernel", kernel)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert converted is kernel
  assert peak < kernel.nbytes


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    (
      lambda tree: tree["decoder"]["layers"]["mlp"].pop("wo"),
      "lack decoder/layers/mlp/wo/kernel; give those of a whole model",
    ),
    (
      lambda tree: put(tree, "decoder/layers/mlp/lora_a", np.ones(3)),
      "hold decoder/layers/mlp/lora_a, which a model of this family does not",
    ),
    (
      lambda tree: put(tree, "decoder/decoder_norm/scale", np.ones(3)),
      r"norm.scale has the shape \(3,\), where the config asks for \(32,\)",
    ),
    (
      lambda tree: transpose(tree["decoder"]["layers"]["mlp"]["wi_0"]),
      r"gate_proj.kernel has the shape \(\d, 48, 32\), where the config asks",
    ),
    (
      lambda tree: transpose(
        tree["decoder"]["layers"]["self_attention"]["out"]
      ),
      r"o_proj.kernel has the shape \(\d, 32, 16, 4\), where the config asks",
    ),
  ],
  ids=["missing", "unknown", "size", "matrix", "heads"],
)
def test_parameters_that_do_not_fit_are_named(change, sentence):
  golden = load(GOLDEN / "qwen3", "float32")
  tree = maxtext_tree("qwen3", golden.config, scanned=True)
  change(tree)
  with pytest.raises(InputError, match=sentence):
    from_maxtext(tree, golden.config)


def transpose(parameter):
  """Of scanned layers: all axes but theirs, the second."""
  x = np.moveaxis(parameter["kernel"], 1, 0)
  reverse = np.transpose(x, (0, *range(x.ndim - 1, 0, -1)))
  parameter["kernel"] = np.moveaxis(reverse, 0, 1)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo3"])
def test_another_number_of_layers_is_refused(name, scanned):
  """More or fewer than the config says, in blocks or not."""
  config = load(GOLDEN / name, "float32").config
  tree = maxtext_tree(name, config, scanned)
  for layers in (config.num_layers - 1, config.num_layers + 1):
    pattern = (config.layer_kinds * 2)[:layers]
    other = dataclasses.replace(
      config,
      num_layers=layers,
      pattern=pattern,
      kinds=config.kinds[: max(pattern) + 1],
    )
    sentence = "has the shape.*layers along axis 1"
    if not scanned:
      sentence = rf"decoder/layers_{min(layers, config.num_layers)}/"
    with pytest.raises(InputError, match=sentence):
      from_maxtext(tree, other)


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_another_axis_of_scanned_layers_is_refused(axis):
  golden = load(GOLDEN / "qwen3", "float32")
  tree = maxtext_tree("qwen3", golden.config, scanned=True)
  with pytest.raises(InputError, match=r"layers along axis|must be 0 or more"):
    from_maxtext(tree, golden.config, scan_axis=axis)


def test_families_that_maxtext_lacks_are_refused():
  golden = load(GOLDEN / "granite", "float32")
  with pytest.raises(InputError, match="the config is of granite"):
    from_maxtext({}, golden.config)


MAXTEXT_NAMES = {
  "llama31": "llama3.1-8b",
  "qwen25": "qwen2.5-7b",
  "qwen3": "qwen3-8b",
  "gemma3": "gemma3-4b",
  "gpt_oss": "gpt-oss-20b",
  "olmo3": "olmo3-7b",
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MAXTEXT_NAMES)
def test_what_maxtext_converts_is_read_back(name):
  """By the package's own names and functions of its conversion."""
  mapping = pytest.importorskip(
    "maxtext.checkpoint_conversion.utils.param_mapping"
  )
  golden = load(GOLDEN / name, "float32")
  config = golden.config
  fields = json.loads((GOLDEN / name / "config.json").read_text())
  fields["head_dim"] = config.head_dim
  files = {
    tensor: x
    for path in (GOLDEN / name).glob("*.safetensors")
    for tensor, x in safetensors.numpy.load_file(path).items()
  }
  if name == "gemma3":
    fields = {"text_config": fields, "vision_config": {"num_hidden_layers": 0}}
    files = {
      tensor.replace("model.", "model.language_model.", 1): x
      for tensor, x in files.items()
    }
  own = types.SimpleNamespace(inhomogeneous_layer_cycle_interval=MAXTEXT[name])
  model = MAXTEXT_NAMES[name]
  hooks = mapping.HOOK_FNS[model](fields, own, True, saving_to_hf=False)
  heads = {"query": config.num_heads}
  heads |= dict.fromkeys(("key", "value"), config.num_kv_heads)

  def shape(path, x):
    """The shape in MaxText of a tensor that is stored."""
    *_, module, kind = path.split("-")
    if module in heads:
      split = (heads[module], config.head_dim)
      return split if kind == "bias" else (config.hidden_size, *split)
    if (module, kind) == ("out", "kernel"):
      return config.num_heads, config.head_dim, config.hidden_size
    return x.shape[::-1] if kind == "kernel" else x.shape

  def converted(key, tensor):
    x, functions = files[tensor], hooks.get(key, [])
    path = key if isinstance(key, str) else key[0]
    target = shape(path, x)
    for change in functions if isinstance(functions, list) else [functions]:
      x = np.asarray(change(x, target))
    return x

  tree = {}
  for key, tensors in mapping.PARAM_MAPPING[model](fields, own, True).items():
    stacked = isinstance(tensors, list)
    tensors = tensors if stacked else [tensors]
    if tensors[0] not in files:
      continue
    found = [converted(key, tensor) for tensor in tensors]
    whole = np.stack(found, axis=1) if stacked else found[0]
    if isinstance(key, str):
      put(tree, key.replace("-", "/"), whole)
      continue
    # One tensor that MaxText has as two: along the last axis.
    for number, path in enumerate(key):
      put(tree, path.replace("-", "/"), whole[..., number])
  assert_same(from_maxtext(tree, config), golden)


def module(**parts):
  """An nnx module with these parts."""
  made = nnx.Module()
  for name, part in parts.items():
    setattr(made, name, part)
  return made


def bonsai_model(name):
  """A golden Qwen3 with the names and shapes of bonsai's."""
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
        kernel=nnx.Param(jnp.asarray(x.reshape(split)))
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

  return module(
    config=types.SimpleNamespace(
      num_layers=config.num_layers,
      vocab_size=config.vocab_size,
      emb_dim=config.hidden_size,
      mlp_dim=config.intermediate_size,
      num_heads=config.num_heads,
      head_dim=config.head_dim,
      num_kv_heads=config.num_kv_heads,
      norm_eps=config.rms_norm_eps,
    ),
    embedder=param("embedding", "model.embed_tokens.weight"),
    layers=nnx.List([layer(number) for number in range(config.num_layers)]),
    final_norm=param("scale", "model.norm.weight"),
    lm_head=param("kernel", "lm_head.weight"),
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


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_of_keras_hub_runs_by_its_own_functions(tied):
  keras_hub = pytest.importorskip("keras_hub")
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    backbone = keras_hub.models.LlamaBackbone(
      vocabulary_size=80,
      num_layers=3,
      num_query_heads=4,
      hidden_dim=32,
      intermediate_dim=48,
      num_key_value_heads=2,
      rope_frequency_adjustment_factor=8.0,
      rope_low_freq_factor=1.0,
      rope_high_freq_factor=4.0,
      rope_pretraining_sequence_length=48,
      tie_word_embeddings=tied,
    )
    draw = np.random.default_rng(0)
    for weight in backbone.weights:
      weight.assign(draw.normal(size=weight.shape) * 0.3)
    rows = rows_of(80)
    model, params = from_keras_hub(backbone, max_positions=128)
    plan = kvjax.get_plan("full", kvjax.Retention(1.0))
    prompts = kvjax.Prompts.of(rows)
    cache, logits = kvjax.prefill(model, params, prompts, plan)
    decoding = kvjax.Decoding(8)
    answers = kvjax.generate(model, params, cache, logits, decoding).rows()
    for row, ids in enumerate(rows):
      tokens = np.array([ids + answers[row]])
      hidden = backbone(
        {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
      )
      expected = backbone.token_embedding(hidden, reverse=True)[0]
      expected = expected[len(ids) - 1 : -1]
      np.testing.assert_allclose(logits[row], expected[0], atol=TOLERANCE)
      assert answers[row] == np.argmax(expected, axis=-1).tolist()
    # Methods that rotate keys, and those that read everything else.
    for name in ("rerotate/keydiff", "expected_attention", "criticalkv"):
      plan = kvjax.get_plan(name, kvjax.Tokens(9))
      cache, _ = kvjax.prefill(model, params, prompts, plan)
      assert kvjax.testing.kept_positions(cache, 0)


def keras_llama(**changes):
  """A small Llama of Keras Hub."""
  keras_hub = pytest.importorskip("keras_hub")
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    return keras_hub.models.LlamaBackbone(
      vocabulary_size=80,
      num_layers=2,
      num_query_heads=4,
      hidden_dim=32,
      intermediate_dim=48,
      num_key_value_heads=2,
      **changes,
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("after", [False, True])
def test_frozen_models_of_keras_hub_run(after):
  """Frozen before the adapter reads the weights, or after it."""
  backbone, rows = keras_llama(), rows_of(80)
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    expected = [
      backbone.token_embedding(
        backbone({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}),
        reverse=True,
      )[0, -1]
      for tokens in (np.array([row]) for row in rows)
    ]
    backbone.trainable = after
    model, params = from_keras_hub(backbone, 128)
    backbone.trainable = False
    assert not backbone.trainable_variables
    plan = kvjax.get_plan("full", kvjax.Retention(1.0))
    logits = kvjax.prefill(model, params, kvjax.Prompts.of(rows), plan)[1]
  np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    (
      lambda backbone: backbone.enable_lora(2),
      "has adapters of LoRA, which kvjax does not read; save its",
    ),
    (
      lambda backbone: backbone.quantize("int8"),
      "is quantized to int8, which kvjax does not read; give a model in",
    ),
  ],
  ids=["lora", "quantized"],
)
def test_changed_layers_of_keras_hub_are_refused(change, sentence):
  backbone = keras_llama()
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    change(backbone)
  with pytest.raises(InputError, match=sentence):
    from_keras_hub(backbone, 128)


def test_other_models_of_keras_hub_are_refused():
  with pytest.raises(InputError, match="this is a SimpleNamespace"):
    from_keras_hub(types.SimpleNamespace(), 128)


def test_another_backend_of_keras_is_refused():
  class Layer:
    """Any layer: all parts are layers, whose weights are no arrays of JAX."""

    variables = (types.SimpleNamespace(value=np.ones(3)),)
    lora_enabled, quantization_mode = False, None

    def __getattr__(self, name):
      return self

  class LlamaBackbone:
    num_query_heads, num_key_value_heads, hidden_dim, num_layers = 4, 2, 32, 1
    transformer_layers = (Layer(),)

  with pytest.raises(InputError, match="set KERAS_BACKEND=jax before Keras"):
    from_keras_hub(LlamaBackbone(), 128)


def test_adapters_read_families_that_there_are():
  for adapter in ADAPTERS.values():
    assert set(adapter.families) <= set(FAMILIES)
