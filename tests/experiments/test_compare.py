"""The binary: a whole run, a text, and one sentence for whatever is wrong."""

import functools
import json
import re
import shutil

import pytest
import safetensors.numpy
from made_up_gates import write_kvzap


@pytest.fixture(scope="module")
def binary(run_binary):
  """Runs `python -m kvjax.experiments.compare` with some arguments."""
  return functools.partial(run_binary, "kvjax.experiments.compare")


@pytest.fixture
def refused(refusal, tiny_directory, tmp_path):
  """Runs the binary on what it must refuse; returns the sentence."""

  def run(*arguments, output=None):
    output = output or tmp_path / "run"
    model = [] if "model" in str(arguments) else [f"--model={tiny_directory}"]
    if "text" not in str(arguments):
      model.append(f"--output={output}")
    told = refusal("kvjax.experiments.compare", *model, *arguments)
    assert told.endswith(".\n")
    assert not output.exists()
    return told.strip()

  return run


def test_a_run_answers_and_a_second_run_has_nothing_to_do(
  binary, tiny_directory, tmp_path
):
  arguments = (
    f"--model={tiny_directory}",
    "--methods=full,streaming:sinks=2",
    "--retention=1,0.5",
    "--tasks=niah_single_2",
    "--samples=2",
    "--batch=2",
    "--length=256",
    "--seed=3",
    "--mesh=data:2,model:2",
    f"--output={tmp_path}/new/run",
  )
  first = binary(*arguments)
  assert first.returncode == 0, first.stderr
  assert "4/4" in first.stderr
  assert re.search(
    r"^2 contexts of [0-9,]+ tokens .* Expect about \d+ (s|min) here",
    first.stderr,
  )
  assert "streaming:sinks=2" in first.stdout
  assert "4 answers in" in first.stdout
  folder = tmp_path / "new" / "run"
  assert {path.name for path in folder.iterdir()} == {
    "samples.jsonl",
    "processes.json",
    "summary.json",
    "table.md",
    "score_vs_retention.png",
  }
  summary = json.loads((folder / "summary.json").read_text())
  assert summary["model"] == "tiny"
  assert (summary["seed"], summary["rows"][0]["length"]) == (3, 256)
  assert summary["dtype"] == "float32"
  assert summary["device"].startswith("4 x CPU")
  assert [(r["method"], r["retention"]) for r in summary["rows"]] == [
    ("full", 1.0),
    ("streaming:sinks=2", 0.5),
  ]
  assert first.stdout.count("100 %") == 1
  assert all(row["samples"] == 2 for row in summary["rows"])
  lines = (folder / "samples.jsonl").read_bytes()

  second = binary(*arguments)
  assert second.returncode == 0, second.stderr
  assert "0 answers in" in second.stdout
  assert "Expect" not in second.stderr
  assert "4 from before" in second.stdout
  assert (folder / "samples.jsonl").read_bytes() == lines
  rows = json.loads((folder / "summary.json").read_text())["rows"]
  assert rows == summary["rows"]

  other = binary(*arguments, "--seed=4")
  assert other.returncode == 2
  assert "holds answers with seed 3, and this run has seed 4" in other.stderr


def test_another_length_in_a_folder_has_a_table_of_its_own(
  binary, tiny_directory, tmp_path
):
  shown = []
  for length, method in ((256, "keydiff"), (384, "snapkv")):
    run = binary(
      f"--model={tiny_directory}",
      f"--methods=full,{method}",
      "--retention=0.5",
      "--tasks=niah_single_2",
      "--samples=1",
      f"--length={length}",
      f"--output={tmp_path}",
    )
    assert run.returncode == 0, run.stderr
    shown.append(run.stdout)
  assert "256 tokens: score" not in shown[0]
  table = (tmp_path / "table.md").read_text()
  for text in (shown[1], table.replace("**", "")):
    parts = re.split(r"(\d+) tokens: score by task", text)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(found) == {"256", "384"}
    assert "keydiff" in found["256"]
    assert "keydiff" not in found["384"]
    assert "snapkv" in found["384"]
    assert "snapkv" not in found["256"]
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert list(summary["about"]) == [
    f"distinct sentences in haystacks of {length} tokens"
    for length in (256, 384)
  ]


def test_devices_that_share_out_tokens_answer_as_one(
  binary, tiny_directory, tmp_path
):
  answers = []
  for mesh in ("model:1", "context:2,model:2"):
    folder = tmp_path / mesh.replace(":", "-")
    run = binary(
      f"--model={tiny_directory}",
      "--methods=full,keydiff",
      "--retention=0.5",
      "--tasks=niah_single_2",
      "--samples=2",
      "--length=256",
      f"--mesh={mesh}",
      f"--output={folder}",
    )
    assert run.returncode == 0, run.stderr
    text = (folder / "samples.jsonl").read_text()
    lines = map(json.loads, text.splitlines())
    answers.append([(line["method"], line["prediction"]) for line in lines])
  assert answers[0] == answers[1]
  assert len(answers[0]) == 4


def test_a_text_is_answered_side_by_side(binary, tiny_directory, tmp_path):
  text = tmp_path / "notes.txt"
  text.write_text("The grass is green. The sky is blue. Ann called.\n")
  result = binary(
    f"--model={tiny_directory}",
    f"--text={text}",
    "--question=Who called?",
    "--methods=full,keydiff",
    "--retention=1",
    "--kv_dtype=int8",
  )
  assert result.returncode == 0, result.stderr
  assert "Who called?" in result.stdout
  # The full cache as it was computed, and in eight bits.
  assert result.stdout.count("100 %") == 2
  assert "keydiff" in result.stdout
  assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_threshold_has_a_retention_of_its_own(
  binary, tiny_directory, tmp_path
):
  gate = write_kvzap(tmp_path / "gate", 32, 2, 2, score_range=[-99, 9999])
  result = binary(
    f"--model={tiny_directory}",
    f"--methods=kvzap:gate={gate}",
    "--threshold=-99,9999",
    "--tasks=niah_single_2",
    "--samples=1",
    "--length=384",
    f"--output={tmp_path}/run",
  )
  assert result.returncode == 0, result.stderr
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  rows = {row["budget"]: row for row in summary["rows"]}
  assert rows["threshold -99"]["retention"] == 1.0
  most = rows["threshold 9999"]
  assert most["context_tokens"] > 128
  assert most["kept_tokens"] == 128
  assert most["retention"] == pytest.approx(
    128 / most["context_tokens"], abs=1e-4
  )


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--methods=keydif"], "no method 'keydif' (did you mean keydiff or "),
    (["--methods=zzz"], "adds one when it is imported, or given to --plugins."),
    (["--methods=keydiff:anchr=x"], "no option 'anchr' (did you mean anchor"),
    (["--methods="], "nothing to compare"),
    (["--retention=0"], "above 0 and at most 1; 0 is not."),
    (["--retention=1.7"], "above 0 and at most 1; 1.7 is not."),
    (["--retention=0.5,25"], "above 0 and at most 1; 25 is not (25 % is 0.25)"),
    (["--retention=half"], "--retention takes numbers such as 0.5,0.25"),
    (["--budget=0"], "A budget of 0 tokens keeps nothing"),
    (["--budget=64", "--retention=.5"], "--retention and --budget do not go"),
    (["--budget=64", "--threshold=-4"], "--budget and --threshold do not go"),
    (
      ["--methods=keydiff", "--threshold=-4"],
      "keydiff cannot have a threshold",
    ),
    (["--kv_dtype=int8", "--every=4"], "--every and --kv_dtype do not go"),
    (["--kv_dtype=fp8", "--methods=flat"], "has flat: flat retrieves keys as"),
    (["--tasks=niah"], "There is no task 'niah'; the tasks are niah_single_1"),
    (["--tasks=vt"], "`kvjax evaluate --benchmark=ruler --tasks=vt` has it."),
    (["--samples=0"], "--samples=0"),
    (["--lenght=512"], "no flag --lenght (did you mean length"),
    (
      ["--compression_ratio=0.5"],
      "no flag --compression_ratio; give --retention, the share that is kept "
      "(1 - compression_ratio); --help",
    ),
    (["--press_name=snapkv"], "no flag --press_name; give --methods; --help"),
    (["--retention=50%"], "such as 0.5,0.25; '50%' is not one."),
    (
      ["--budget=0.5"],
      "--budget counts tokens (did you mean --retention=0.5?).",
    ),
    (["extra"], "There is no argument 'extra'"),
    (["--dtype=int8"], "--dtype=int8"),
    (["--mesh=data:64"], "needs 64 devices; there are 4."),
    (["--length=4096"], "--length=4096 and 2 tokens of chat template are"),
    (["--length=32"], "A length of 32 tokens is too short for niah_s"),
    (["--text=no.txt", "--question=Why?"], "no.txt cannot be read: No such"),
    (["--question=Why?"], "--text=FILE and --question=... need each other."),
    (["--text=a", "--samples=2"], "--text and --samples do not go together"),
    (["--model=/nowhere"], "There is no model '/nowhere'; give the path"),
  ],
)
def test_what_is_wrong_is_said_in_one_sentence(refused, arguments, sentence):
  assert sentence in refused(*arguments)


@pytest.mark.parametrize(
  ("output", "sentence"),
  [("file/run", "file is no folder"), ("/proc/run", "cannot be written")],
)
def test_an_output_that_cannot_be_written_is_refused(
  refused, tmp_path, output, sentence
):
  (tmp_path / "file").write_text("")
  assert sentence in refused(output=tmp_path / output)


def test_an_empty_text_is_refused(refused, tmp_path):
  (tmp_path / "empty.txt").write_text("\n")
  sentence = refused(f"--text={tmp_path}/empty.txt", "--question=Why?")
  assert "empty.txt is empty" in sentence


def test_a_text_longer_than_the_context_is_refused(refused, tmp_path):
  (tmp_path / "long.txt").write_text("The sky is blue. " * 200)
  sentence = refused(f"--text={tmp_path}/long.txt", "--question=Why?")
  assert "Context (1003 tokens), question (5) and answer" in sentence
  assert sentence.endswith("the context of this model is 512.")


def _without_weights(folder):
  (folder / "model.safetensors").unlink()


def _with_a_missing_shard(folder):
  names = safetensors.numpy.load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  shard = "model-00001-of-00002.safetensors"
  index = {"weight_map": dict.fromkeys(names, shard)}
  path = folder / "model.safetensors.index.json"
  path.write_text(json.dumps(index))


def _edit_config(folder, **fields):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _with_wrong_shapes(folder):
  _edit_config(folder, intermediate_size=64)


def _of_an_unknown_kind(folder):
  _edit_config(folder, model_type="mamba")


@pytest.mark.parametrize(
  ("damage", "sentence"),
  [
    (_without_weights, "has no weights"),
    (_with_a_missing_shard, "lacks the shard model-00001-of-00002"),
    (_with_wrong_shapes, "has shape (32, 48); config.json asks for (32, 64)."),
    (_of_an_unknown_kind, "model_type 'mamba', which is not supported"),
  ],
)
def test_a_model_that_cannot_be_loaded_is_refused(
  refused, tiny_directory, tmp_path, damage, sentence
):
  folder = tmp_path / "model"
  shutil.copytree(tiny_directory, folder)
  damage(folder)
  assert sentence in refused(f"--model={folder}")


def test_help_lists_the_flags_and_succeeds(run_binary):
  result = run_binary("kvjax.experiments.main", "compare", "--help")
  assert result.returncode == 0
  assert result.stderr == ""
  lines = result.stdout.splitlines()
  assert lines[0].startswith("Compares methods on needle tasks")
  assert "  kvjax compare" in lines
  assert max(map(len, lines)) <= 80
  own, methods = lines.index("Flags:"), lines.index("Methods and budgets:")
  assert own < lines.index(
    "  --output=TEXT: Output folder, or its address. Default: results/demo."
  )
  assert any(line.startswith("  --methods=A,B: ") for line in lines[methods:])
  assert any("lagkv:lag=32:retention_of=row," in line for line in lines)
  assert "  --[no]dry_run: " in result.stdout
  assert "  --heads=kv|query: " in result.stdout
  # The program's default, not that of the module that defines the flag.
  assert "  --samples=N: Samples per task. Default: 2." in lines
