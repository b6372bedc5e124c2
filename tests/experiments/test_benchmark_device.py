"""The benchmarks of a device: steps, their files, and random models."""

import json

import pytest

SIZES = {
  **{"model_type": "llama", "vocab_size": 512, "hidden_size": 32},
  **{"intermediate_size": 64, "num_hidden_layers": 2, "hidden_act": "silu"},
  **{"num_attention_heads": 4, "num_key_value_heads": 2},
  **{"max_position_embeddings": 1024, "rms_norm_eps": 1e-5},
}
PROGRAM = "kvjax.experiments.benchmark_device"


@pytest.mark.slow
def test_a_step_keeps_what_it_prints_and_runs_once(tmp_path, run_binary):
  sizes = tmp_path / "config.json"
  sizes.write_text(json.dumps(SIZES))
  arguments = [
    *(f"--sizes={sizes}", "--length=640", "--rows=2", "--only=decode"),
    f"--output={tmp_path / 'out'}",
  ]
  first = run_binary(PROGRAM, *arguments)
  assert first.returncode == 0, first.stderr
  (kept,) = (tmp_path / "out").iterdir()
  assert kept.name == "decode_640.txt"
  command, _, printed = kept.read_text().partition("\n")
  assert command == (
    f"kvjax benchmark_decode --sizes={sizes} "
    "--methods=keydiff,adakv,ctkvr.512 --length=576 --rows=2 --tokens=64"
  )
  assert "2 contexts of up to 576 tokens, 64 tokens each" in printed
  assert printed.count("\n full ") == 1
  again = run_binary(PROGRAM, *arguments)
  assert again.returncode == 0
  assert "decode_640.txt is there." in again.stdout


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--rows=4"], "--rows has 1 numbers and --length 2"),
    (["--only=decoding"], "--only takes some of check, kernels"),
    (["--sizes=llama-9"], "There is no model 'llama-9'"),
    (["--length=many"], "--length takes numbers of tokens"),
  ],
)
def test_what_is_wrong_is_one_sentence(run_binary, arguments, sentence):
  result = run_binary(PROGRAM, *arguments)
  assert result.returncode == 2
  assert sentence in result.stderr
  assert "Traceback" not in result.stderr


@pytest.mark.parametrize("flag", ["--model=reference", "--mesh=data:2"])
def test_random_weights_are_no_models(run_binary, flag):
  result = run_binary(
    "kvjax.experiments.benchmark_decode", "--sizes=llama-3.1-8b", flag
  )
  assert result.returncode == 2
  name = flag.partition("=")[0]
  assert f"on one device; leave out {name}." in result.stderr
