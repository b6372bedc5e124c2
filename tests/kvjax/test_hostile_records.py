"""Calibrations, saved caches and gates of any contents get one sentence."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pytest
import safetensors.numpy
from made_up_gates import kvzap_tensors, write_kvzap
from odd_files import refused

import kvjax
from kvjax.allocation.streaming_heads import read_pattern
from kvjax.calibration.fields import to_json
from kvjax.errors import InputError
from kvjax.methods.kvzap_gate import KVzapGate
from kvjax.testing import TinyModel

NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**4000
CALIBRATION = kvjax.Calibration(
  alpha=0.5,
  beta=-3.0,
  model_id="tiny",
  method="KeyDiff",
  per_query_head=False,
  tau_range=(0.2, 1.0),
  error=0.05,
  triples=100,
  promises=((0.5, 0.6), (0.9, 0.95)),
  preset="prefill",
  slopes=(("tail_nll", 0.5),),
  ranges=(("nll", 0.1, 5.0),),
  grid=(0.1, 0.5),
  shape=(0.5, 0.9),
  r2=(("all", 0.5),),
)


@pytest.mark.parametrize(
  "fields",
  [
    {"alpha": NAN},
    {"alpha": HUGE},
    {"beta": INFINITE},
    {"beta": "0"},
    {"model_id": None},
    {"method": 5},
    {"per_query_head": 0},
    {"tau_range": [0.2, 2.0]},
    {"tau_range": [0.9, 0.2]},
    {"tau_range": [0.1, 0.2, 0.3]},
    {"error": -1},
    {"error": NAN},
    {"triples": 1.5},
    {"triples": True},
    {"triples": 0},
    {"promises": [[0.9, 0.95], [0.5, 0.6]]},
    {"promises": [[0.5, 0.5], [0.5, 0.6]]},
    {"promises": [[0.5, NAN]]},
    {"promises": [[0.5]]},
    {"preset": "other"},
    {"preset": []},
    {"slopes": {"shoe_size": 1}},
    {"slopes": {"tail_nll": NAN}},
    {"slopes": [["tail_nll", 1]]},
    {"ranges": {"nll": [5.0, 0.1]}},
    {"ranges": {"nll": [NAN, 1.0]}},
    {"ranges": {"shoe_size": [0, 1]}},
    {"ranges": {"nll": [1]}},
    {"grid": [0.0, 0.5]},
    {"grid": [0.5, 0.1]},
    {"grid": []},
    {"shape": [0.5]},
    {"shape": [0.9, 0.5]},
    {"shape": [NAN, NAN]},
    {"r2": {"all": INFINITE}},
    {"r2": {"all": None}},
    {"seed": 0.5},
    {"data": None},
    {"another": 1},
    {"model_id": "another\nmodel\x1b[2J"},
  ],
  ids=[str(number) for number in range(40)],
)
def test_calibrations_that_are_none(tmp_path, fields):
  path = tmp_path / "a.json"
  saved = to_json(dataclasses.asdict(CALIBRATION))
  path.write_text(json.dumps(saved))
  assert kvjax.Calibration.load(path, model_id="tiny") == CALIBRATION
  path.write_text(json.dumps(saved | fields))
  refused(
    lambda: kvjax.Calibration.load(path, model_id="tiny"),
    "is no calibration, for|A calibration must have|that of the model 'another",
  )


@pytest.fixture(scope="module")
def model():
  return TinyModel()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
  prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  target = tmp_path_factory.mktemp("saved") / "cache"
  kvjax.save_cache(cache, target, model=model, model_id="tiny")
  return target


def _of_arrays(**fields):
  """Changes what is said of every array."""

  def change(content):
    if isinstance(content, dict):
      if "array" in content:
        content |= fields
      content = list(content.values())
    for child in content if isinstance(content, list) else ():
      change(child)

  return lambda description: change(description["cache"])


def _of_cache(**fields):
  return lambda description: description["cache"].update(fields)


def _said(**fields):
  return lambda description: description.update(fields)


CACHES = {
  "endless": _of_arrays(shape=[2**40]),
  "negative": _of_arrays(shape=[-1]),
  "letters": _of_arrays(shape="ab"),
  "objects": _of_arrays(dtype="object"),
  "texts": _of_arrays(dtype="U9"),
  "no dtype": _of_arrays(dtype="float99"),
  "one array": _of_arrays(array="cache.another"),
  "the disk": _said(arrays="/"),
  "above": _said(arrays="../../../.."),
  "processes": _said(arrays="/proc/self"),
  "itself": _said(arrays="."),
  "elsewhere": _said(arrays="arrays-0/../../../.."),
  "a number": _said(arrays=5),
  "no files": _said(files=None),
  "a list": _said(cache=[]),
  "nothing": _said(cache=None),
  "another class": _of_cache(**{"class": "Prompts"}),
  "no class": _of_cache(**{"class": []}),
  "a method": _said(cache={"class": "KeyDiff", "fields": {}}),
  "no fields": _of_cache(fields={}),
  "a list of fields": _of_cache(fields=[]),
  "no model": _said(model=None),
  "no layers": _said(model={"id": "tiny", "layers": 5}),
  "another model": _said(model={"id": "a\nb" * 1000, "layers": []}),
  "no layout": _said(layout=None),
  "a long layout": _said(layout="x" * 10**6),
}


@pytest.mark.parametrize("kind", CACHES)
def test_caches_that_are_none(model, saved, tmp_path, kind):
  """The checksum is right: somebody has computed it."""
  target = tmp_path / "cache"
  shutil.copytree(saved, target)
  path = target / "cache.json"
  description = json.loads(path.read_text())
  del description["checksum"]
  CACHES[kind](description)
  description["checksum"] = zlib.crc32(json.dumps(description).encode())
  path.write_text(json.dumps(description))

  def load():
    kvjax.load_cache(target, model=model, model_id="tiny")

  refused(
    load,
    "is damaged or incomplete|of another model|reads layout|The cache holds a",
  )
  with pytest.raises(kvjax.InputError) as caught:
    load()
  assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["a pipe", "a loop", "zeros", "the disk"])
def test_what_lies_among_arrays_is_not_read(model, saved, tmp_path, kind):
  """Links and pipes beside the files of a cache are passed over."""
  target = tmp_path / "cache"
  shutil.copytree(saved, target)
  (folder,) = target.glob("arrays-*")
  if kind == "a pipe":
    os.mkfifo(folder / "more")
  else:
    place = {"a loop": "more", "zeros": "/dev/zero", "the disk": "/"}[kind]
    (folder / "more").symlink_to(place)
  cache = kvjax.load_cache(target, model=model, model_id="tiny")
  assert cache.next_positions.tolist() == [4, 2]


@pytest.mark.parametrize(
  "fields",
  [
    {"n_modules": 10**12},
    {"n_modules": HUGE},
    {"input_dim": 2**62},
    {"output_dim": True},
    {"hidden_dim": 0},
    {"hidden_dim": 5},
    {"score_range": [0, HUGE]},
    {"score_range": [-HUGE, 0]},
    {"score_range": [NAN, 1]},
    {"score_range": [1, 0]},
    {"score_range": [False, True]},
    {"score_range": "ab"},
    {"score_range": None},
  ],
  ids=[str(number) for number in range(13)],
)
def test_gates_that_are_none(tmp_path, fields):
  path = write_kvzap(tmp_path / "gate", 32, 2, 2, **fields)
  refused(lambda: KVzapGate.read(path), "has no layers|must")


@pytest.mark.parametrize(
  "bias",
  [
    np.full(2, 1e300),
    np.full(2, NAN, np.float32),
    np.zeros((2, 2), np.float32),
    np.zeros(0, np.float32),
  ],
  ids=["huge", "NaN", "square", "empty"],
)
def test_weights_of_gates_that_are_none(tmp_path, bias):
  path = write_kvzap(tmp_path / "gate", 32, 2, 2)
  tensors = kvzap_tensors(32, 2, 2) | {"layers.0.bias": bias}
  file = tmp_path / "gate" / "model.safetensors"
  safetensors.numpy.save_file(tensors, file)
  refused(lambda: KVzapGate.read(path), r"must be finite numbers \(2,\)")


@pytest.mark.parametrize(
  "text",
  ["", "# a\n", "1 2\n3\n", "nan 1\n", "inf 1\n", "1,2\n", "\0", "1_0\n"],
)
def test_patterns_that_are_none(tmp_path, text):
  path = tmp_path / "heads.tsv"
  path.write_text(text)
  refused(lambda: read_pattern(str(path)), "must have a line for each layer")


def test_warnings_are_about_the_line_of_the_caller(tmp_path):
  """In a process without the checks of tests, whose frames are no caller's."""
  path = tmp_path / "script.py"
  path.write_text(
    "import kvjax\n"
    "import numpy as np\n"
    f"calibration = kvjax.{CALIBRATION!r}\n"
    "nll, length = np.array([9.0]), np.array([100])\n"
    "features = kvjax.Features(nll=nll, length=length, tail_nll=nll)\n"
    "kvjax.Calibrated(calibration, 0.9).retentions(features)\n"
  )
  done = subprocess.run(
    [sys.executable, path], capture_output=True, text=True, check=True
  )
  assert done.stderr.startswith(f"{path}:6: InputWarning: The calibration of")


def test_a_target_that_is_no_number_has_no_retention():
  features = kvjax.Features(nll=np.array([1.0]), length=np.array([100]))
  with pytest.raises(InputError, match=r"tau is .* nan is not"):
    CALIBRATION.retentions(features, float("nan"))


@pytest.mark.usefixtures("untyped")
def test_a_tau_is_a_number():
  with pytest.raises(InputError, match=r"tau must be a number; '0.9' is not"):
    kvjax.Calibrated(None, "0.9")
