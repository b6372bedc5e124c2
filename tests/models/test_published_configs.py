"""Configs as their makers publish them: read with what they mean, or refused.

The files in `configs/` have the fields of public checkpoints' config.json.
"""

import json
import math
import pathlib
import warnings

import jax
import pytest
from flax import nnx

from kvjax.errors import InputError, InputWarning
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.families import FAMILIES

FOLDER = pathlib.Path(__file__).parent / "configs"

# Parameters as the checkpoints' files hold them, the context in tokens, and
# how positions are rotated.
READ = {
  "CodeLlama-34b-Instruct-hf": (33_743_970_304, 16_384, "default", 1e6),
  "CodeLlama-7b-hf": (6_738_546_688, 16_384, "default", 1e6),
  "DeepSeek-R1-0528-Qwen3-8B": (8_190_735_360, 131_072, "yarn", 1e6),
  "DeepSeek-R1-Distill-Llama-8B": (8_030_261_248, 131_072, "llama3", 5e5),
  "DeepSeek-R1-Distill-Qwen-1.5B": (1_777_088_000, 131_072, "default", 1e4),
  "DeepSeek-R1-Distill-Qwen-7B": (7_615_616_512, 131_072, "default", 1e4),
  "Llama-2-70b-chat-hf": (68_976_648_192, 4_096, "default", 1e4),
  "Llama-2-7b-hf": (6_738_415_616, 4_096, "default", 1e4),
  "Llama-3.1-70B": (70_553_706_496, 131_072, "llama3", 5e5),
  "Llama-3.1-8B-Instruct": (8_030_261_248, 131_072, "llama3", 5e5),
  "Llama-3.1-Tulu-3-8B": (8_030_326_784, 131_072, "llama3", 5e5),
  "Llama-3.2-1B": (1_235_814_400, 131_072, "llama3", 5e5),
  "Llama-3.2-3B-Instruct": (3_212_749_824, 131_072, "llama3", 5e5),
  "Llama-3.3-70B-Instruct": (70_553_706_496, 131_072, "llama3", 5e5),
  "Meta-Llama-3-8B-Instruct": (8_030_261_248, 8_192, "default", 5e5),
  "Mistral-7B-Instruct-v0.3": (7_248_023_552, 32_768, "default", 1e6),
  "Mistral-7B-v0.1": (7_241_732_096, 32_768, "default", 1e4),
  "Mistral-Nemo-Instruct-2407": (12_247_782_400, 1_024_000, "default", 1e6),
  "OLMo-2-1124-7B": (7_298_617_344, 4_096, "default", 5e5),
  "Olmo-3-1025-7B": (7_298_011_136, 65_536, "yarn", 5e5),
  "Phi-3-mini-4k-instruct": (3_821_079_552, 4_096, "default", 1e4),
  "QwQ-32B": (32_763_876_352, 40_960, "default", 1e6),
  "Qwen1.5-7B-Chat": (7_721_324_544, 32_768, "default", 1e6),
  "Qwen2-7B-Instruct": (7_615_616_512, 32_768, "default", 1e6),
  "Qwen2.5-0.5B-Instruct": (494_032_768, 32_768, "default", 1e6),
  "Qwen2.5-72B-Instruct": (72_706_203_648, 32_768, "default", 1e6),
  "Qwen2.5-7B-Instruct-1M": (7_615_616_512, 1_010_000, "default", 1e7),
  "Qwen2.5-7B-Instruct": (7_615_616_512, 32_768, "default", 1e6),
  "Qwen3-0.6B": (596_049_920, 40_960, "default", 1e6),
  "Qwen3-30B-A3B": (30_532_122_624, 40_960, "default", 1e6),
  "Qwen3-32B": (32_762_123_264, 40_960, "default", 1e6),
  "Qwen3-4B-Instruct-2507": (4_022_468_096, 262_144, "default", 5e6),
  "Qwen3-8B": (8_190_735_360, 40_960, "default", 1e6),
  "SmolLM-135M": (134_515_008, 2_048, "default", 1e4),
  "SmolLM2-1.7B-Instruct": (1_711_376_384, 8_192, "default", 1.3e5),
  "SmolLM2-135M": (134_515_008, 8_192, "default", 1e5),
  "SmolLM3-3B": (3_075_098_624, 65_536, "default", 5e6),
  "TinyLlama-1.1B-Chat-v1.0": (1_100_048_384, 2_048, "default", 1e4),
  "Yarn-Llama-2-7b-64k": (6_738_415_616, 65_536, "yarn", 1e4),
  "Yi-34B-200K": (34_388_917_248, 200_000, "default", 1e7),
  "Yi-6B": (6_061_035_520, 4_096, "default", 5e6),
  "c4ai-command-r7b-12-2024": (8_028_033_024, 132_096, "default", 5e4),
  "deepseek-coder-6.7b-instruct": (6_740_512_768, 65_536, "linear", 1e5),
  "deepseek-llm-7b-chat": (6_910_365_696, 4_096, "default", 1e4),
  "gemma-3-1b-it": (999_885_952, 32_768, "default", 1e6),
  "gpt-oss-20b": (20_914_757_184, 131_072, "yarn", 1.5e5),
  "granite-3.1-2b-instruct": (2_533_531_648, 131_072, "default", 5e6),
  "llama-7b": (6_738_415_616, 2_048, "default", 1e4),
  "phi-4": (14_659_507_200, 16_384, "default", 2.5e5),
  "transformers-5--Llama-2-7b": (6_738_415_616, 4_096, "default", 1e4),
  "transformers-5--Llama-3.2-1B": (1_235_814_400, 131_072, "llama3", 5e5),
  "transformers-5--Qwen2.5-0.5B": (494_032_768, 32_768, "default", 1e6),
  "transformers-5--Qwen3-8B": (8_190_735_360, 40_960, "default", 1e6),
  "unsloth--Llama-3.2-1B-Instruct": (1_235_814_400, 131_072, "llama3", 5e5),
  "unsloth--Qwen3-4B": (4_022_468_096, 40_960, "default", 1e6),
  "vicuna-7b-v1.5-16k": (6_738_415_616, 16_384, "linear", 1e4),
  "vicuna-7b-v1.5": (6_738_415_616, 4_096, "default", 1e4),
}
REFUSED = {
  "Llama-2-7B-Chat-GPTQ": "quantized weights; load the unquantized model",
  "Qwen2.5-7B-Instruct-AWQ": "quantized weights; load the unquantized model",
  "gemma-2-2b-it": "model_type 'gemma2', which is not supported",
  "mlx-community--Qwen2.5-0.5B-Instruct-4bit": "quantized weights; load the",
  "unsloth--Llama-3.2-1B-Instruct-bnb-4bit": "quantized weights; load the",
}
# Layers with a window, and its size.
WINDOWS = {
  "Mistral-7B-v0.1": (32, 4096),
  "Olmo-3-1025-7B": (24, 4096),
  "Phi-3-mini-4k-instruct": (32, 2047),
  "c4ai-command-r7b-12-2024": (24, 4096),
  "gemma-3-1b-it": (22, 512),
  "gpt-oss-20b": (12, 128),
}
# Fields that other programs read, and what they are named in.
WARNED = {
  "DeepSeek-R1-0528-Qwen3-8B": "0.8782488562869419 for the rope field 'attn_fa",
  "Qwen2.5-7B-Instruct-1M": "passes over: dual_chunk_attention_config.",
}


def fields(name):
  return json.loads((FOLDER / f"{name}.json").read_text())


def parameters(config):
  """How many numbers the weights of a model are."""
  decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
  leaves = jax.tree.leaves(nnx.state(decoder))
  return sum(math.prod(leaf.shape) for leaf in leaves)


def test_every_file_is_expected():
  files = sorted(path.stem for path in FOLDER.glob("*.json"))
  assert files == sorted([*READ, *REFUSED])
  assert len(files) >= 50
  kinds = {fields(name)["model_type"] for name in READ}
  assert kinds == set(FAMILIES)


@pytest.mark.parametrize("name", READ)
def test_read_without_a_word(name):
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    config = DecoderConfig.from_hf(fields(name))
  count, context, kind, theta = READ[name]
  assert parameters(config) == count
  assert config.geometry.max_positions == context
  assert (config.rope.kind, config.rope.theta) == (kind, theta)
  windows = [spec.window for spec in config.geometry.layers if spec.window]
  number, size = WINDOWS.get(name, (0, 0))
  assert windows == [size] * number
  assert [w.category for w in said] == [InputWarning] * (name in WARNED)
  assert all(WARNED[name] in str(w.message) for w in said)
  assert DecoderConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("name", REFUSED)
def test_refused_for_the_right_reason(name):
  with pytest.raises(InputError) as caught:
    DecoderConfig.from_hf(fields(name))
  assert REFUSED[name] in str(caught.value)
  assert "; it " not in str(caught.value)  # And for no other.


def test_a_file_of_transformers_5_means_what_the_published_one_means():
  pairs = {
    "transformers-5--Llama-2-7b": "Llama-2-7b-hf",
    "transformers-5--Llama-3.2-1B": "Llama-3.2-1B",
    "transformers-5--Qwen2.5-0.5B": "Qwen2.5-0.5B-Instruct",
    "transformers-5--Qwen3-8B": "Qwen3-8B",
  }
  for new, old in pairs.items():
    configs = [DecoderConfig.from_hf(fields(name)) for name in (new, old)]
    assert configs[0] == configs[1]
