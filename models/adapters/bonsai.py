"""Qwen3 of jax-ml/bonsai."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from kvjax.errors import InputError
from kvjax.models.adapters.assembly import assemble
from kvjax.models.adapters.parameters import Parameters, Stored, stack
from kvjax.models.config import DecoderConfig
from kvjax.models.pretrained import Pretrained
from kvjax.models.tokenizer import Tokenizer

# bonsai rotates by this base, whatever the field `rope_theta` of its config is.
_THETA = 1_000_000
_TOP = {
  "embed_tokens.embedding": "embedder/embedding",
  "norm.scale": "final_norm/scale",
}


def from_bonsai(
  model: nnx.Module,
  *,
  max_positions: int = 40_960,
  dtype: DTypeLike | None = None,
  mesh: jax.sharding.Mesh | None = None,
  tokenizer: Tokenizer | None = None,
) -> Pretrained:
  """Makes a model of a Qwen3 of bonsai.

  Embedding, output matrix and final norm are shared; those of the layers are
  stacked, which copies them.

  Written against commit 12bb742 of bonsai (`bonsai.models.qwen3`), whose
  projections have kernels [E, N, D] and [N, D, E]; of earlier commits, which
  call these `w`, only those that embed by `nnx.Embed`. bonsai is not imported.

  Args:
    model: a `Qwen3`.
    max_positions: context in tokens, which the model does not state.
    dtype: dtype of the weights; by default theirs.
    mesh: as for `kvjax.models.load`.
    tokenizer: the tokenizer, if there is one.

  Raises:
    InputError: the model is no Qwen3 of bonsai, or its parameters are missing,
      unknown, or of sizes that do not agree.
  """
  params = Parameters(nnx.state(model, nnx.Param), "bonsai")
  # Tied weights are stored twice.
  output = params[_kernel(params, "lm_head")]
  embedding = params[_TOP["embed_tokens.embedding"]]
  tied = output.shape == embedding.shape[::-1] and bool(
    jnp.array_equal(output, embedding.T)
  )
  config = _config(params, _epsilon(model), max_positions, tied)

  def find(name: str, layers: Sequence[int]) -> Stored:
    if name == "lm_head.kernel":
      return output
    if not layers:
      return params[_TOP[name]]
    path, _, last = name.replace("self_attn", "attn").rpartition(".")
    paths = [f"layers/{layer}/{path.replace('.', '/')}" for layer in layers]
    if last == "kernel":
      return stack([params[_kernel(params, one)] for one in paths])
    return stack([params[f"{one}/{last}"] for one in paths])

  lm = assemble(config, find, dtype, mesh, tokenizer)
  params.refuse_rest()
  return lm


def _kernel(params: Parameters, path: str) -> str:
  """The path of a projection's matrix."""
  older = f"{path}/w"
  return older if older in params else f"{path}/kernel"


def _epsilon(model: nnx.Module) -> float:
  """Epsilon of all norms."""
  norm = getattr(model, "final_norm", None)
  # Older commits have a class of their own.
  for name in ("epsilon", "norm_eps"):
    if hasattr(norm, name):
      return float(getattr(norm, name))
  raise InputError(
    "from_bonsai takes a Qwen3 of bonsai.models.qwen3, whose final_norm has an "
    f"epsilon; this is a {type(model).__name__} without it."
  )


def _config(
  params: Parameters, epsilon: float, max_positions: int, tied: bool
) -> DecoderConfig:
  """The config that the sizes of the parameters say."""
  start = "layers/0"
  vocabulary, hidden = _shape(params, _TOP["embed_tokens.embedding"], 2)
  _, queries, size = _shape(params, _kernel(params, f"{start}/attn/q_proj"), 3)
  _, heads, _ = _shape(params, _kernel(params, f"{start}/attn/k_proj"), 3)
  numbers = {path.split("/")[1] for path in params.paths() if "layers/" in path}
  return DecoderConfig.from_hf(
    {
      "model_type": "qwen3",
      "vocab_size": vocabulary,
      "hidden_size": hidden,
      "intermediate_size": _shape(params, f"{start}/mlp/up_proj/kernel", 2)[1],
      "num_hidden_layers": len(numbers),
      "num_attention_heads": queries,
      "num_key_value_heads": heads,
      "head_dim": size,
      "max_position_embeddings": max_positions,
      "rms_norm_eps": epsilon,
      "rope_theta": _THETA,
      "tie_word_embeddings": tied,
    }
  )


def _shape(params: Parameters, path: str, axes: int) -> tuple[int, ...]:
  shape = params[path].shape
  if len(shape) != axes:
    raise InputError(
      f"The parameter {path} has the shape {shape}, where a Qwen3 of bonsai "
      f"has {axes} axes."
    )
  return shape
