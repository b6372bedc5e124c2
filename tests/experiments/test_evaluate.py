"""The binary: killed and run again, and one sentence for what is wrong."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def binary(run_binary):
  return functools.partial(run_binary, "experiments.evaluate")


def samples_file(output):
  return next(iter(output.glob("*/samples.jsonl")), None)


def test_a_killed_run_loses_and_doubles_nothing(
  binary, tiny_directory, tmp_path
):
  """Killed between two batches, or while it writes one."""
  arguments = (
    "--benchmark=needle",
    f"--model={tiny_directory}",
    "--methods=streaming:sinks=2",
    "--retention=0.5",
    "--length=256",
    "--depths=4",
    "--samples=8",
    "--batch=1",
    f"--output={tmp_path}",
  )
  run = subprocess.Popen(
    [sys.executable, "-m", "experiments.evaluate", *arguments],
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  while run.poll() is None:
    path = samples_file(tmp_path)
    if path is not None and path.read_bytes().count(b"\n") >= 2:
      os.kill(run.pid, signal.SIGKILL)
      break
    time.sleep(0.01)
  assert run.wait() == -signal.SIGKILL
  before = path.read_bytes()
  kept = before[: before.rfind(b"\n") + 1]
  assert 2 <= kept.count(b"\n") < 64

  again = binary(*arguments)
  assert again.returncode == 0, again.stderr
  assert f"{kept.count(b'\n')} from before" in again.stdout
  after = path.read_bytes()
  assert after.startswith(kept)
  answers = [json.loads(line) for line in after.splitlines()]
  places = [(a["method"], a["depth"], a["sample"]) for a in answers]
  assert len(places) == len(set(places)) == 64
  assert {sample for _, _, sample in places} == set(range(32))
  assert {a["depth"] for a in answers} == {0, 1 / 3, 2 / 3, 1}


def test_runs_in_one_folder_add_up(binary, tiny_directory, tmp_path):
  """Other methods and more samples join what is there; nothing is mixed up."""

  def run(*arguments):
    result = binary(
      "--benchmark=needle",
      f"--model={tiny_directory}",
      "--retention=0.5",
      "--length=256",
      f"--output={tmp_path}",
      *arguments,
    )
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("*/summary.json")
    rows = json.loads(path.read_text())["rows"]
    return {(r["method"], r["depth"]): r["samples"] for r in rows}

  depths = (0, 1 / 2, 1)
  one = run("--methods=streaming", "--depths=3", "--samples=1")
  assert one == {(m, d): 1 for m in ("full", "streaming") for d in depths}
  two = run("--methods=keydiff", "--depths=3", "--samples=2")
  more = {(m, d): 2 for m in ("full", "keydiff") for d in depths}
  assert two == one | more
  lines = samples_file(tmp_path).read_bytes().splitlines()
  answers = [json.loads(line) for line in lines]
  assert len({(a["method"], a["asked"]) for a in answers}) == len(answers) == 15


def test_longbench_is_asked_with_and_without_the_template(
  binary, tiny_directory, tmp_path
):
  rows = [
    {
      "input": "Question: Who is it?\nType:",
      "context": f"Question: What is a cat {number}?\nType: animal\n" * 5,
      "answers": ["human"],
      "all_classes": ["human", "animal"],
      "length": 60,
      "dataset": "trec",
      "language": "en",
      "_id": str(number),
    }
    for number in range(2)
  ]
  data = tmp_path / "data"
  data.mkdir()
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (data / "trec.jsonl").write_text(text)
  said = {}
  for chat in ("always", "official"):
    output = tmp_path / chat
    result = binary(
      "--benchmark=longbench",
      f"--data={data}",
      f"--chat={chat}",
      f"--model={tiny_directory}",
      "--methods=streaming",
      "--retention=0.5",
      "--length=300",
      f"--output={output}",
    )
    assert result.returncode == 0, result.stderr
    (path,) = output.glob("*/summary.json")
    summary = json.loads(path.read_text())
    said[chat] = summary["data"]["chat template"], summary["about"]
    assert [r["samples"] for r in summary["rows"]] == [2, 2]
  assert said["always"][0] == "always"
  assert "no chat template" not in said["always"][1]
  assert said["official"][0] == "official"
  assert said["official"][1]["no chat template"] == "trec"


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--tasks=niah_singel_2"], "'niah_singel_2' (did you mean niah_single_2"),
    (["--tasks=qa_1"], "qa_1 cannot be asked: give SQuAD's dev-v2.0.json by"),
    (["--squad=none.json"], "none.json"),
    (["--tasks=vt", "--length=100"], "A length of 100 tokens is too short"),
    (["--length=4000"], "longer than the context of this model, 512 tokens"),
    (["--length=1k"], "--length takes numbers of tokens such as 1024,2048"),
    (["--benchmark=longbench"], "LongBench is read from disk; give its"),
    (
      ["--benchmark=needle", "--turns=3"],
      "--turns belongs to --benchmark=multiturn, not to needle",
    ),
    (
      ["--benchmark=multiturn", "--protocol=query-aware"],
      "Conversations are compressed before any question is known",
    ),
  ],
)
def test_what_is_wrong_is_one_sentence(
  binary, tiny_directory, tmp_path, arguments, sentence
):
  output = tmp_path / "run"
  result = binary(f"--model={tiny_directory}", f"--output={output}", *arguments)
  assert result.returncode == 2, result.stderr
  assert sentence in result.stderr
  assert len(result.stderr.splitlines()) == 1
  assert not output.exists()
