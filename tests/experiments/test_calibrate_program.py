"""What `kvjax calibrate` writes and prints, and what reads its records."""

import json
import shlex

import matplotlib.image
import numpy as np
import pytest


@pytest.mark.slow
def test_the_program_writes_records_that_compare_reads(
  run_binary, tiny_directory, tmp_path
):
  model = f"--model={tiny_directory}"
  folder = tmp_path / "new" / "calibration"
  asked = ["--methods=streaming", "--length=256", "--samples=1"]
  asked += ["--tasks=niah_single_1"]
  asked += ["--seed=7", "--batch=3", "--dtype=float32"]
  plugin = tmp_path / "mine.py"
  plugin.write_text(
    "import kvjax\nkvjax.register('mine_here', kvjax.methods.FullKV)\n"
  )
  flags = ["--others=1", "--held_out=1", "--retention=0.5"]
  flags += [f"--plugins={plugin}"]
  command = ["kvjax.experiments.calibrate", model, *asked, *flags]
  dry = run_binary(*command, f"--output={folder}", "--dry_run")
  assert dry.returncode == 0, dry.stderr
  # Before it measures, and after.
  assert dry.stderr.startswith("3 contexts of")
  assert dry.stdout.startswith("3 contexts of")
  assert not folder.exists()
  done = run_binary(*command, f"--output={folder}")
  assert done.returncode == 0, done.stderr
  (few,) = [line for line in done.stdout.splitlines() if "promise" in line]
  assert few.startswith("1 context of --others cannot promise --tau=0.95")
  assert few.endswith("19 can, as --others=19 draws.")
  assert {path.name for path in folder.iterdir()} == {
    *("triples.jsonl", "others.jsonl", "held_out.jsonl", "processes.json"),
    *("summary.json", "calibration.md", "ratio_curves.png"),
    *("retention_bars.png", "records"),
  }
  assert matplotlib.image.imread(folder / "ratio_curves.png").std() > 0.01
  summary = json.loads((folder / "summary.json").read_text())
  (one,) = summary["rows"]
  assert one["triples"] == 1
  assert one["held_out"]["samples"] == 1
  record = json.loads((folder / "records" / "streaming.json").read_text())
  for field, name in (("alpha", "alpha"), ("method", "options")):
    assert record[field] == one[name]
  assert record["preset"] == "prefill"
  assert record["grid"] == [0.5]
  # One context cannot promise more than half.
  assert max(kept for _, kept in record["promises"]) <= 0.5
  assert "niah_single_1 of 256 tokens" in record["data"]

  told = done.stdout.splitlines()[-1]
  report = (folder / "calibration.md").read_text()
  assert told.partition(": ")[2] in report
  said, _, arguments = told.partition(" -- ")
  assert said.endswith("within 5 points: kvjax trials --first_seed=10")
  # All given flags, and the prose that was calibrated on.
  assert {
    *("--batch=3", "--dtype=float32", "--essay=training_chapters"),
    f"--plugins={plugin}",
  } < {*shlex.split(arguments)}
  assert "--seed" not in arguments
  asked_there = run_binary(
    "kvjax.experiments.evaluate",
    *shlex.split(arguments),
    "--samples=1",
    "--dry_run",
  )
  assert asked_there.returncode == 0, asked_there.stderr

  measured = (folder / "triples.jsonl").read_bytes()
  again = run_binary(*command, f"--output={folder}", "--tau=0.5", "--others=0")
  assert again.returncode == 0, again.stderr
  assert "0/0" not in again.stderr
  assert "cannot promise" not in again.stdout
  assert (folder / "triples.jsonl").read_bytes() == measured
  refitted = json.loads((folder / "summary.json").read_text())
  assert (refitted["tau"], refitted["others"]) == (0.5, 0)
  # It took no time to measure, unlike the run before it.
  assert refitted["seconds"] == summary["seconds"]

  auto = ["--retention=auto", "--tau=0.9"]
  missing = run_binary("kvjax.experiments.evaluate", model, *asked, *auto)
  assert missing.returncode == 2
  assert "calibrations has no calibration of it; make one" in missing.stderr
  assert len(missing.stderr.splitlines()) == 1
  output = tmp_path / "compared"
  found = run_binary(
    "kvjax.experiments.compare",
    model,
    *asked,
    *auto,
    f"--calibrations={folder / 'records'}",
    f"--output={output}",
  )
  assert found.returncode == 0, found.stderr
  rows = json.loads((output / "summary.json").read_text())["rows"]
  assert [row["budget"] for row in rows] == ["1", "auto at 0.9"]
  lines = (output / "samples.jsonl").read_text().splitlines()
  answers = map(json.loads, lines)
  own = [a["retention"] for a in answers if a["options"] == rows[1]["options"]]
  assert rows[1]["retention"] == pytest.approx(np.mean(own), abs=1e-4)
  assert "auto at 0.9: " in found.stdout


def test_a_quality_that_is_none_is_refused_before_anything_runs(
  refusal, tmp_path
):
  output = tmp_path / "calibration"
  told = refusal("kvjax.experiments.calibrate", "--tau=0", f"--output={output}")
  assert told.startswith("tau is the share of quality that is to be")
  assert not output.exists()
