"""The benchmarks of a device: steps, their files, and random models."""

import json

import pytest

from kvjax.experiments.timing import device_steps

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
    *(f"--sizes={sizes}", "--shapes=2x640", "--only=decode"),
    f"--output={tmp_path / 'out'}",
  ]
  first = run_binary(PROGRAM, *arguments)
  assert first.returncode == 0, first.stderr
  kept, folder = (tmp_path / "out" / f"decode_640{s}" for s in (".txt", ""))
  command, _, printed = kept.read_text().partition("\n")
  assert command == (
    f"kvjax benchmark_decode --sizes={sizes} "
    "--methods=keydiff,adakv,ctkvr.512 --length=576 --rows=2 --tokens=64 "
    f"--output={folder}"
  )
  assert "2 contexts of up to 576 tokens, 64 tokens each" in printed
  assert printed.count("\n full ") == 1
  assert "2 contexts of up to 576" in (folder / "table.md").read_text()
  again = run_binary(PROGRAM, *arguments)
  assert again.returncode == 0
  assert "decode_640.txt is there." in again.stdout


def test_a_step_of_other_settings_is_refused(tmp_path, refusal):
  kept = tmp_path / "decode_640.txt"
  text = "kvjax benchmark_decode --sizes=llama-3.2-1b --rows=2\n\n 7 ms\n"
  kept.write_text(text)
  arguments = ["--shapes=2x640", "--only=check,decode", f"--output={tmp_path}"]
  told = refusal(PROGRAM, *arguments)
  assert f"{kept} is of another command, 'kvjax benchm" in told
  assert kept.read_text() == text
  assert [*tmp_path.iterdir()] == [kept]


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--shapes=4x32768,2x32768"], "--shapes takes batches of different len"),
    (["--shapes=32768"], "'32768' does not fit"),
    (["--shapes="], "--shapes takes batches"),
    (["--only=decoding"], "--only takes some of check, kernels"),
    (["--sizes=llama-9"], "There is no model 'llama-9'"),
  ],
)
def test_what_is_wrong_is_one_sentence(refusal, arguments, sentence):
  assert sentence in refusal(PROGRAM, *arguments)


@pytest.mark.slow
def test_steps_are_programs_with_flags_that_they_have(tmp_path, run_binary):
  rows = {32768: 4, 1024: 1}
  steps = dict(device_steps.steps(rows, "llama-3.1-8b", tmp_path))
  assert {name.partition("_")[0] for name in steps} == {*device_steps.KINDS}
  assert [*steps] == [
    *("check", "kernels", "decode_32768", "decode_1024", "batch", "sparse"),
    "scoring",
  ]
  for program, *options in steps.values():
    page = run_binary(f"kvjax.experiments.{program}", "--help").stdout
    for option in options:
      assert f"{option.partition('=')[0]}=" in page, (program, option)


@pytest.mark.parametrize("flag", ["--model=reference", "--mesh=data:2"])
def test_random_weights_are_no_models(refusal, flag):
  told = refusal(
    "kvjax.experiments.benchmark_decode", "--sizes=llama-3.1-8b", flag
  )
  name = flag.partition("=")[0]
  assert f"on one device; leave out {name}." in told
