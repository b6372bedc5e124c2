"""Classification of the fields of a config.json that the decoder does not read.

Some cannot change a result, some would, and the others are unknown.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from kvjax.models.fields import format_value

# Fields about the file, training, generation or heads other than next-token
# prediction, and other names of fields that have been read.
_WITHOUT_EFFECT = frozenset(
  # The file and its origin.
  "architectures auto_map author base_model base_model_name_or_path bf16 "
  "chat_template custom_pipelines datasets device device_map dtype fp16 "
  "initial_context_length is_llama_config library_name license "
  "local_files_only local_rank max_seq_len "
  "max_seq_length max_sequence_length metadata model_max_length model_name "
  "n_ctx n_positions ffn_dim_multiplier "
  "name_or_path num_parameters onnx padding_side seed seq_len seq_length tags "
  "tokenizer_class tokenizer_model_max_length torch_dtype torchscript "
  "trust_remote_code use_bfloat16 use_safetensors version "
  # Implementation options of transformers.
  "attention_softmax_in_fp32 attn_implementation cache_implementation "
  "chunk_size_feed_forward device_mesh flash_attention gradient_checkpointing "
  "low_cpu_mem_usage pretraining_tp return_dict softmax_in_fp32 "
  "tensor_parallel_size tf_legacy_loss tp_plan use_cache use_flash_attention "
  "use_flash_attention_2 use_flash_attn use_kernels "
  # Training and other heads.
  "finetuning_task id2label initializer_range is_decoder is_encoder_decoder "
  "keys_to_ignore_at_inference label2id label_smoothing loss_type "
  "neftune_noise_alpha num_labels output_attentions output_hidden_states "
  "output_router_logits "
  "problem_type std task_specific_params tie_encoder_decoder "
  # Generation.
  "bad_words_ids begin_suppress_tokens diversity_penalty do_sample "
  "early_stopping encoder_no_repeat_ngram_size "
  "exponential_decay_length_penalty length_penalty max_length max_new_tokens "
  "min_length min_p no_repeat_ngram_size num_beam_groups num_beams "
  "num_return_sequences output_logits output_scores prefix "
  "remove_invalid_values repetition_penalty return_dict_in_generate "
  "suppress_tokens temperature top_k top_p typical_p".split()
)
_PREFIXES = ("_", "transformers", "unsloth", "initializer_", "training_")
_SUFFIXES = (
  "_dropout",
  "_dropout_prob",
  "_init",
  "_loss_coef",
  "_loss_scale",
  "_pdrop",
  "_token",
  "_token_id",
  "_token_ids",
  "_token_index",
  "_version",
)

# Words in the names of fields that change the computation.
_SIGNIFICANT = frozenset(
  "absolute act activation alibi bias bidirectional causal clip differential "
  "expert experts gate gated gelu learned local moe mrope multiplier noncausal "
  "nope pruned qk quant quantization quantized relu residual rope rotary "
  "scalar scale scaled scaling sink sinks sliding softcap softcapping softmax "
  "sparse sparsity window windows".split()
)
# Those of them that are factors, for which 1 is neutral.
_FACTORS = frozenset("multiplier rotary scalar scale scaling".split())
# Those of them whose value may be the name of the activation.
_ACTIVATIONS = frozenset(["act", "activation"])

# Every token sees all before it, whatever a file calls this.
_ALL_BEFORE = ("causal", "full", "full_attention", "global")

# Other fields that change the computation, with their neutral values.
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
  "add_cross_attention": (False,),
  "attention_chunk_size": (),
  "attention_type": _ALL_BEFORE,
  "attn_logit_cap": (),
  "attn_temperature_tuning": (False, 0),
  "attn_type": _ALL_BEFORE,
  "causal": (True,),
  "gated_mlp": (True,),
  "index_topk": (),
  "is_causal": (True,),
  "kv_lora_rank": (),
  "no_bias": (True,),
  "num_kv_shared_layers": (0,),
  "norm_type": ("rms_norm", "rmsnorm", "RMSNorm"),
  "parallel_attn": (False,),
  "position_embedding_type": ("rope", "rotary"),
  "post_norm": (False,),
  "query_key_norm": (False,),
  "rope_pct": (1,),
  "rope_ratio": (1,),
  "rope_type": ("default",),
  "use_causal_mask": (True,),
  "use_cross_layer_kv_sharing": (False,),
  "use_rope": (True,),
  "use_rotary_emb": (True,),
  "v_head_dim": (),
}


class FieldKinds(NamedTuple):
  """Fields that a decoder does not read.

  Attributes:
    faults: errors about fields that would change a result; see
      `kvjax.models.fields.ConfigError`.
    unknown: names of fields whose meaning is unknown, sorted.
  """

  faults: list[str]
  unknown: list[str]


def classify_fields(
  rest: Mapping[str, Any], model_type: str, activations: Collection[str]
) -> FieldKinds:
  """Classifies the fields that have not been read.

  Fields that cannot change a result, or have a neutral value, are in neither
  list.

  Args:
    rest: the fields.
    model_type: model type of the decoder.
    activations: names of its activation.
  """
  result = FieldKinds([], [])
  for name, value in sorted(rest.items()):
    if _has_no_effect(name) or _is_neutral(name, value, activations):
      continue
    if name in _SUPPORTED_VALUES or _words(name) & _SIGNIFICANT:
      result.faults.append(
        f"has {format_value(value)} for {name!r}, which is not supported for "
        f"{model_type}"
      )
    else:
      result.unknown.append(name)
  return result


def _has_no_effect(name: str) -> bool:
  return (
    name in _WITHOUT_EFFECT
    or name.startswith(_PREFIXES)
    or name.endswith(_SUFFIXES)
  )


def _is_neutral(name: str, value: Any, activations: Collection[str]) -> bool:
  if value is None:
    return True
  if name in _SUPPORTED_VALUES:
    return value in _SUPPORTED_VALUES[name]
  words = _words(name)
  if "causal" in words:
    # Of other names, only a negation says what its value means.
    negated = words & {"non", "not"}
    return value in ([], {}) or bool(negated and value is False)
  if words & _ACTIVATIONS and isinstance(value, str) and value in activations:
    return True
  if isinstance(value, (int, float)) and not isinstance(value, bool):
    if words & _FACTORS:
      return value == 1
    return value == 0 and bool(words & _SIGNIFICANT)
  return value is False or value in ("", [], {})


def _words(name: str) -> frozenset[str]:
  return frozenset(re.split(r"[^a-z0-9]+", name.lower()))
