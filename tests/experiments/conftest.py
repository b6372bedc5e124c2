"""Programs as a user starts them, and a model too small to know anything."""

import json
import pathlib
import socket
import subprocess
import sys

import pytest
from absl import flags
from flax import nnx

from kvjax import models
from kvjax.experiments.reference import vocabulary
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder

ROOT = pathlib.Path(__file__).parents[2]
POSITIONS = 512

# Imports what takes seconds once, then runs a program in a fork per command; it
# says the process of each, and how it has ended.
_RUNNER = """
import json, os, runpy, sys
import absl.app, rich.progress
import kvjax.experiments.report.writing, kvjax.experiments.run.side_by_side
import matplotlib.backends.backend_agg

def run(module, arguments, out, err):
  child = os.fork()
  if child == 0:
    for path, number in ((out, 1), (err, 2)):
      os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [module, *arguments]
    code = 1
    try:
      runpy.run_module(module, run_name="__main__")
      code = 0
    except SystemExit as stop:
      code = stop.code or 0
    finally:
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(code)
  print(child, flush=True)
  return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for line in sys.stdin:
  print(run(*json.loads(line)), flush=True)
"""


@pytest.fixture
def parsed():
  """Marks the flags as parsed, as a program does."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["test"])


@pytest.fixture(scope="session")
def run_binary(tmp_path_factory):
  """Runs `python -m MODULE` with some arguments; warnings are errors.

  `meanwhile` is called with the number of its process.
  """
  folder = tmp_path_factory.mktemp("binary")
  runner = subprocess.Popen(
    [sys.executable, "-W", "error", "-c", _RUNNER],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )

  def run(module, *arguments, meanwhile=lambda process: None):
    arguments = [str(argument) for argument in arguments]
    paths = [str(folder / "out"), str(folder / "err")]
    runner.stdin.write(json.dumps([module, arguments, *paths]) + "\n")
    runner.stdin.flush()
    meanwhile(int(runner.stdout.readline()))
    code = int(runner.stdout.readline())
    out, err = (pathlib.Path(path).read_text() for path in paths)
    return subprocess.CompletedProcess(arguments, code, out, err)

  yield run
  runner.stdin.close()
  assert runner.wait() == 0
  runner.stdout.close()


@pytest.fixture(scope="session")
def refusal(run_binary):
  """Runs `python -m MODULE`; returns the one line that refuses it."""

  def run(module, *arguments):
    done = run_binary(module, *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr

  return run


def pretrained(**fields):
  """A tiny random model with the vocabulary of the samples."""
  config = DecoderConfig.from_hf(
    {
      "model_type": "llama",
      "vocab_size": vocabulary.SIZE,
      "hidden_size": 32,
      "intermediate_size": 48,
      "num_hidden_layers": 2,
      "num_attention_heads": 4,
      "num_key_value_heads": 2,
      "head_dim": 8,
      "max_position_embeddings": POSITIONS,
      "tie_word_embeddings": True,
      **fields,
    }
  )
  model, params = from_decoder(Decoder(config, rngs=nnx.Rngs(0)))
  tokenizer = models.Tokenizer(vocabulary.build(), vocabulary.config(POSITIONS))
  return models.Pretrained(model, params, tokenizer)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
  directory = tmp_path_factory.mktemp("models") / "tiny"
  models.save(pretrained(), directory)
  return directory


@pytest.fixture(scope="session")
def hybrid():
  """Its second layer has a window of 6."""
  return pretrained(
    model_type="qwen3",
    use_sliding_window=True,
    sliding_window=6,
    max_window_layers=1,
  )


@pytest.fixture(scope="session")
def scaled():
  """Its attention multiplies logits by 3 instead of D^-1/2."""
  return pretrained(
    model_type="granite",
    attention_multiplier=3.0,
    embedding_multiplier=1.0,
    residual_multiplier=1.0,
    logits_scaling=1.0,
  )


@pytest.fixture(scope="session")
def tiny(tiny_directory):
  return models.load(tiny_directory, "float32")


@pytest.fixture
def port():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]
