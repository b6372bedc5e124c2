"""The binary: killed and run again, and one sentence for what is wrong."""

import functools
import json
import os
import signal
import time

import pytest


@pytest.fixture(scope="module")
def binary(run_binary):
  return functools.partial(run_binary, "kvjax.experiments.evaluate")


def samples_file(output):
  return next(iter(output.glob("*/samples.jsonl")), None)


@pytest.mark.slow
def test_a_killed_run_loses_and_doubles_nothing_and_others_join_it(
  binary, tiny_directory, tmp_path
):
  """Killed between two batches, or while it writes one; then terminated.

  Then another method and more samples join what is there; nothing is mixed up.
  """

  def run(method, conversations, **others):
    return binary(
      "--benchmark=multiturn",
      f"--model={tiny_directory}",
      f"--methods={method}",
      "--retention=0.5",
      "--length=320",
      "--turns=4",
      f"--samples={conversations}",
      "--batch=1",
      f"--output={tmp_path}",
      **others,
    )

  def send(number, process):
    # Both methods answer together; the first two answers have been noted when
    # the third is written.
    before = lines()
    while lines() < before + 3:
      time.sleep(0.01)
    # Inside `open`, an interrupt makes Python warn of an unclosed file.
    time.sleep(0.03)
    os.kill(process, number)

  def lines():
    path = samples_file(tmp_path)
    return 0 if path is None else path.read_bytes().count(b"\n")

  kill = functools.partial(send, signal.SIGKILL)
  killed = run("streaming:sinks=2", 8, meanwhile=kill)
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  terminate = functools.partial(send, signal.SIGTERM)
  ended = run("streaming:sinks=2", 8, meanwhile=terminate)
  assert ended.returncode == 143, ended.stderr
  assert ended.stderr.endswith("Stopped.\n")
  assert "Traceback" not in ended.stderr
  path = samples_file(tmp_path)
  before = path.read_bytes()
  kept = before[: before.rfind(b"\n") + 1]
  assert 2 <= kept.count(b"\n") < 64
  processes = path.with_name("processes.json")
  first, second = json.loads(processes.read_text())["processes"]

  again = run("streaming:sinks=2", 8)
  assert again.returncode == 0, again.stderr
  assert f"{kept.count(b'\n')} from before" in again.stdout
  after = path.read_bytes()
  assert after.startswith(kept)
  answers = [json.loads(line) for line in after.splitlines()]
  places = [(a["method"], a["turn"], a["sample"]) for a in answers]
  assert len(places) == len(set(places)) == 64
  assert {sample for _, _, sample in places} == set(range(32))
  summary = json.loads(path.with_name("summary.json").read_text())
  assert summary["device"] == first["device"]
  earlier = first["seconds"]["total"] + second["seconds"]["total"]
  assert summary["seconds"]["total"] > earlier

  # It reads a part, from the host.
  lookup = "flat:sinks=2:local=5:offload=true"
  other = run(lookup, 9)
  assert other.returncode == 0, other.stderr
  summary = json.loads(path.with_name("summary.json").read_text())
  assert len(json.loads(processes.read_text())["processes"]) == 4
  found = {(r["method"], r["turn"]): r["samples"] for r in summary["rows"]}
  samples = {"full": 9, lookup: 9, "streaming:sinks=2": 8}
  assert found == {(m, t): n for m, n in samples.items() for t in range(4)}
  page = path.with_name("report.html").read_text()
  for column in ("kept", "read", "KiB", "on host"):
    assert f">{column}</button>" in page
  answers = [json.loads(line) for line in path.read_bytes().splitlines()]
  places = {(a["method"], a["asked"]) for a in answers}
  assert len(places) == len(answers) == 4 * (9 + 9 + 8)


@pytest.mark.slow
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
      f"--strict_official={chat == 'official'}",
      f"--model={tiny_directory}",
      "--methods=full",
      "--length=300",
      f"--output={output}",
    )
    assert result.returncode == 0, result.stderr
    (path,) = output.glob("*/summary.json")
    summary = json.loads(path.read_text())
    said[chat] = summary["data"]["chat template"], summary["about"]
    faulty = "LongBench's own code, faults included"
    assert (summary["data"].get("metrics") == faulty) == (chat == "official")
    page = path.with_name("report.html").read_text()
    assert ("faults included" in page) == (chat == "official")
    assert [r["samples"] for r in summary["rows"]] == [2]
  assert said["always"][0] == "always"
  assert "no chat template" not in said["always"][1]
  assert said["official"][0] == "official"
  assert said["official"][1]["no chat template"] == "trec"


@pytest.mark.slow
def test_needles_of_the_users_texts_after_compressed_questions(
  binary, run_binary, tiny_directory, tmp_path
):
  """The texts and their repetition are recorded, and kvpress's layout too."""
  essay = tmp_path / "tales.txt"
  essay.write_text("A tale is told. The sea is wide. " * 30)
  output, exported = tmp_path / "run", tmp_path / "kvpress"
  result = binary(
    "--benchmark=needle",
    f"--essay={essay}",
    "--words=wonderwords",
    "--protocol=query-aware-kvpress",
    f"--model={tiny_directory}",
    "--methods=keydiff",
    "--retention=0.5",
    "--length=400",
    "--depths=2",
    "--samples=1",
    f"--output={output}",
  )
  assert result.returncode == 0, result.stderr
  assert "At 400 tokens the prose repeats itself: " in result.stdout
  (path,) = output.glob("*/summary.json")
  summary = json.loads(path.read_text())
  assert summary["protocol"] == "query-aware-kvpress"
  assert summary["data"]["essay"].startswith("tales.txt (sha256 ")
  assert summary["data"]["keys"].startswith("wonderwords (sha256 ")
  share = summary["about"]["distinct sentences in haystacks of 400 tokens"]
  assert int(share.removesuffix(" %")) < 50
  said = f"haystacks of 400 tokens: {share}"
  assert said in path.with_name("report.html").read_text()
  result = run_binary(
    "kvjax.experiments.leaderboard", str(output), f"--kvpress={exported}"
  )
  assert result.returncode == 0, result.stderr
  configs = [json.loads(p.read_text()) for p in exported.rglob("config.yaml")]
  assert configs
  assert all(config["query_aware"] is True for config in configs)


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--tasks=niah_singel_2"], "'niah_singel_2' (did you mean niah_single_2"),
    (["--tasks="], "Name a task; the tasks are niah_single_1, niah_single_2"),
    (["--tasks=qa_1"], "qa_1 cannot be asked: give SQuAD's dev-v2.0.json by"),
    (["--squad=none.json"], "none.json"),
    (["--tasks=vt", "--length=100"], "A length of 100 tokens is too short"),
    (["--length=4000"], "longer than the context of this model, 512 tokens"),
    (["--benchmark=passkey", "--length=99"], "99 tokens is too short for this"),
    (["--benchmark=needle", "--length=60"], "60 tokens is too short for this"),
    (["--length=1k"], "--length takes numbers of tokens such as 1024,2048"),
    (["--benchmark=longbench"], "LongBench is read from disk; give its"),
    (
      ["--strict_official"],
      "--strict_official belongs to --benchmark=longbench, not to ruler",
    ),
    (
      ["--benchmark=needle", "--turns=3"],
      "--turns belongs to --benchmark=multiturn, not to needle",
    ),
    (
      ["--benchmark=passkey", "--words=wonderwords"],
      "--words belongs to --benchmark=ruler, needle and multiturn, not to pass",
    ),
    (
      ["--benchmark=needle", "--words=words.txt"],
      "is a list for RULER's cwe; needles' keys are of --words=wonderwords",
    ),
    (["--benchmark=multiturn", "--essay=none.txt"], "none.txt cannot be read"),
    (
      ["--benchmark=multiturn", "--protocol=query-aware-kvpress"],
      "If the question is known, a conversation's context ends with",
    ),
    (
      ["--benchmark=multiturn", "--protocol=query-aware"],
      "which the others follow; choose --history=conversation or own",
    ),
  ],
)
def test_what_is_wrong_is_one_sentence(
  refusal, tiny_directory, tmp_path, arguments, sentence
):
  output = tmp_path / "run"
  assert sentence in refusal(
    *("kvjax.experiments.evaluate", f"--model={tiny_directory}"),
    *(f"--output={output}", *arguments),
  )
  assert not output.exists()
