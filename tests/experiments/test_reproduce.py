"""The binary: the list, what it refuses, and an experiment from end to end."""

import functools
import re

import pytest

from kvjax.experiments.papers.registry import EXPERIMENTS


@pytest.fixture(scope="module")
def binary(run_binary):
  return functools.partial(run_binary, "kvjax.experiments.reproduce")


def test_alone_it_lists_every_experiment(binary):
  result = binary()
  assert result.returncode == 0, result.stderr
  listed = re.findall(r"^ ?(E\d\.\d+) ", result.stdout, re.MULTILINE)
  assert listed == list(EXPERIMENTS)
  assert max(map(len, result.stdout.splitlines())) <= 80
  assert "kvjax has no" in result.stdout


def test_hosts_meet_before_anything_is_on_a_device(binary, port):
  here = f"--coordinator=127.0.0.1:{port}"
  result = binary("--multihost", here, "--hosts=1", "--host=0")
  assert result.returncode == 0, result.stderr


def test_an_analysis_runs_and_what_cannot_be_says_why(
  binary, tiny_directory, tmp_path
):
  # A model of the user's, without data: the needles are asked of it.
  address = f"file://{tmp_path}"
  arguments = (f"--model={tiny_directory}", f"--output={address}")
  result = binary("E2.8", "E4.4", *arguments, "--length=256", "--samples=1")
  assert result.returncode == 0, result.stderr
  assert "tiny on generated data: not the paper's data;" in result.stdout
  assert "This cannot be run. kvjax has no sparse prefill" in result.stdout
  written = [p.relative_to(tmp_path) for p in tmp_path.rglob("*.*")]
  assert {str(path) for path in written} >= {
    "E2.8/tiny/paper.md",
    "E2.8/tiny/paper.json",
  }
  assert f"\nWritten to {address}/E2.8/tiny/paper.md\n" in result.stdout
  assert "kvjax-" not in result.stdout


@pytest.mark.slow
def test_every_analysis_writes_its_pictures(binary, tiny_directory, tmp_path):
  pictures = {
    "E2.6": ["determinants"],
    "E2.7": ["components"],
    "E2.8": ["alike", "apart", "norms", "top"],
    "E2.11": ["keys_and_attention"],
    "E2.12": ["queries"],
    "E3.9": ["layers", "mask"],
    "E4.11": ["recalled"],
  }
  arguments = (f"--model={tiny_directory}", f"--output={tmp_path}")
  result = binary(*pictures, *arguments, "--length=360", "--samples=1")
  assert result.returncode == 0, result.stderr
  for name, expected in pictures.items():
    folder = tmp_path / name / "tiny"
    found = sorted(path.stem for path in folder.glob("*.png"))
    assert found == expected
    text = (folder / "paper.md").read_text()
    assert all(f"![{picture}.png]" in text for picture in found)


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["E9.1"], "There is no experiment 'E9.1' (did you mean "),
    (["e5.1"], "There is no experiment 'e5.1' (did you mean E5.1"),
    (["E5.2", "--data=files"], "--data needs a --model that can answer it"),
    (["E5.2", "--model=x", "--data=/nope"], "There is no file or folder /nope"),
    (["E5.1", "--essay=/nope"], "/nope cannot be read"),
    (["E1.1", "--samples=0"], "--samples=0"),
    (["E4.1", "--length=512"], "--length does not go with an experiment that"),
    (["E1.1", "--output=/proc/x"], "/proc/x cannot be written"),
    (["E3.6", "--output=memory://a/b"], "E3.6 runs other programs, which wri"),
    (["E3.7", "--tau=0"], "above 0 and at most 1; 0 is not."),
    (["E3.5", "--tau=nan"], "above 0 and at most 1; nan is not."),
    (["E3.5", "E5.1", "--tau=0.9"], "--tau is for E3.5 to E3.7, not for E5.1"),
    (["E5.1", "--trials"], "--trials is for E3.6 and E3.7, not for E5.1."),
    (["E5.1", "E2.10", "--samples=3"], "E2.10 does not read --samples; leave"),
    (["E3.8", "--tasks=vt"], "E3.8 does not read --tasks"),
    (["E4.6", "--length=512"], "E4.6 does not read --length"),
    (["E3.6", "--trials"], "--trials repeats E3.6 on LongBench; give its --d"),
    (["E3.7", "--tasks=nih"], "There is no task 'nih'"),
    (["E3.6", "--tasks=qa_2"], "qa_2 cannot be asked: give HotpotQA's"),
    (["E3.7", "E5.1", "--tasks=vt,niah_singl_2"], "'niah_singl_2' (did you"),
    (["E5.1", "--tasks=qasper"], "There is no task 'qasper'"),
  ],
)
def test_what_is_wrong_is_said_in_one_sentence(
  refusal, arguments, sentence, tmp_path
):
  """Before anything runs or is written."""
  output = tmp_path / "papers"
  module = "kvjax.experiments.reproduce"
  assert sentence in refusal(module, f"--output={output}", *arguments)
  assert not output.exists()


@pytest.mark.parametrize("other", ["E2.11", "E3.6"])
def test_one_data_is_of_one_benchmark(refusal, other, tmp_path):
  """Also where programs read it."""
  output = tmp_path / "papers"
  said = refusal(
    "kvjax.experiments.reproduce",
    *(other, "E2.14", "--model=x", f"--data={tmp_path}"),
    f"--output={output}",
  )
  assert f"{other} reads longbench and E2.14 reads math500, which" in said
  assert not output.exists()
