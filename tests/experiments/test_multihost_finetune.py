"""Two hosts train together what one trains; a lost one is made up for."""

import json
import re
import signal
import time

import numpy as np
import pytest
import safetensors.numpy
from two_hosts import start

FLAGS = ("--length=48", "--epochs=2", "--rank=2", "--batch=4")


@pytest.fixture
def documents(tmp_path):
  folder = tmp_path / "documents"
  folder.mkdir()
  for number in range(3):
    text = f"File {number} is read when the others have been closed. " * 9
    (folder / f"{number}.txt").write_text(text)
  return folder


def both(*arguments, **options):
  hosts = [
    start(*FLAGS, *arguments, host=host, program="finetune", **options)
    for host in range(2)
  ]
  return hosts, [process.communicate(timeout=300) for process in hosts]


def log(output):
  """Lines of the log without their times."""
  lines = map(json.loads, (output / "log.jsonl").read_text().splitlines())
  return [{**line, "seconds": 0} for line in lines]


def newest(output):
  """The step of the newest checkpoint that is complete, or 0."""
  # Orbax names what is complete by the number alone.
  names = [path.name for path in output.glob(".checkpoints/*")]
  return max(
    (int(name) // 256 for name in names if name.isdecimal()), default=0
  )


def assert_same(output, expected):
  """Sums in another order differ in their last digits."""
  for ours, theirs in zip(log(output), log(expected), strict=True):
    assert ours == theirs | {"nll": pytest.approx(theirs["nll"], rel=1e-5)}
  for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
    found, wanted = (
      safetensors.numpy.load_file(folder / name)
      for folder in (output, expected)
    )
    assert found.keys() == wanted.keys()
    for tensor, value in wanted.items():
      np.testing.assert_allclose(found[tensor], value, atol=1e-4)


@pytest.mark.parametrize(
  "mesh", [[], ["--mesh=data:4"], ["--mesh=data:2,model:2"]]
)
def test_two_hosts_train_what_one_trains(
  run_binary, tiny_directory, documents, tmp_path, port, mesh
):
  given = (f"--model={tiny_directory}", f"--documents={documents}")
  one, two = tmp_path / "one", tmp_path / "two"
  hosts, ended = both(*given, *mesh, port=port, output=two)
  assert [process.returncode for process in hosts] == [0, 0], ended
  alone = run_binary(
    "kvjax.experiments.finetune", *FLAGS, *given, f"--output={one}"
  )
  assert alone.returncode == 0, alone.stderr
  assert_same(two, one)
  assert len(log(one)) == 3
  assert "The finetuned model is in" in ended[0][0]
  assert "finetuned" not in ended[1][0]


@pytest.mark.slow
def test_training_that_has_lost_a_host_goes_on(
  run_binary, tiny_directory, documents, tmp_path, port
):
  given = (f"--model={tiny_directory}", f"--documents={documents}")
  one, two = tmp_path / "one", tmp_path / "two"
  hosts = [
    start(
      *(*FLAGS, *given, "--epochs=12"),
      **{"host": host, "port": port, "output": two, "program": "finetune"},
    )
    for host in range(2)
  ]
  while newest(two) == 0 or len(log(two)) == 1:
    time.sleep(0.05)
    assert hosts[0].poll() is None, hosts[0].communicate()
  hosts[1].send_signal(signal.SIGKILL)
  ended = [process.communicate(timeout=300) for process in hosts]
  # It notices by itself, or is ended by JAX's runtime, which aborts.
  assert hosts[0].returncode in (143, -signal.SIGABRT), ended
  done = len(log(two))
  assert 1 < done < 13
  again, ended = both(*given, "--epochs=12", port=port, output=two)
  assert [process.returncode for process in again] == [0, 0], ended
  assert "epoch 1 of" not in ended[0][0]
  alone = run_binary(
    *("kvjax.experiments.finetune", *FLAGS, *given, "--epochs=12"),
    f"--output={one}",
  )
  assert alone.returncode == 0, alone.stderr
  assert len(log(two)) == 13
  for ours, theirs in zip(log(two), log(one), strict=True):
    assert ours == theirs | {"nll": pytest.approx(theirs["nll"], rel=1e-3)}


@pytest.mark.slow
@pytest.mark.parametrize("preempted", [0, 1])
def test_a_preempted_host_lets_both_save_their_last_step(
  tiny_directory, documents, tmp_path, port, preempted
):
  given = (f"--model={tiny_directory}", f"--documents={documents}")
  given = (*given, "--epochs=200", "--verbosity=0")
  for path in documents.iterdir():
    # More than a hundred steps make an epoch, whose end is saved.
    path.write_text(path.read_text() * 25)
  output = tmp_path / "out"
  hosts = [
    start(
      *(*FLAGS, *given),
      **{"host": host, "port": port, "output": output, "program": "finetune"},
    )
    for host in range(2)
  ]
  try:
    while "The first step" not in (line := hosts[0].stderr.readline()):
      assert line, hosts[0].communicate()
    # Until the other one has taken it, too.
    time.sleep(1)
    hosts[preempted].terminate()
    ended = [process.communicate(timeout=300) for process in hosts]
  finally:
    for process in hosts:
      process.kill()
  assert hosts[0].returncode == 143, ended
  # JAX aborts those who have lost the coordinator, which is host 0.
  assert hosts[1].returncode in (143, -signal.SIGABRT), ended
  said = re.search(r"step (\d+) of (\d+) is saved", ended[0][1])
  assert said, ended
  step, steps = map(int, said.groups())
  assert newest(output) == step < steps
  # The first one alone says so, and logs.
  assert "Saved a checkpoint" in ended[0][1]
  assert "Saved a checkpoint" not in ended[1][1]
  assert "is saved" not in ended[1][1]


@pytest.mark.slow
def test_hosts_that_cannot_train_together_are_told_why(
  tiny_directory, documents, tmp_path, port
):
  given = (f"--model={tiny_directory}", f"--documents={documents}")
  folder = tmp_path / "two"
  for flag, output, sentence in (
    (
      "--mesh=data:2",
      folder,
      "--mesh=data:2 has devices of one host, and this program",
    ),
    (
      "--batch=3",
      folder,
      "--batch=3 is no multiple of 4, the size of the axis 'data'",
    ),
    (
      "--batch=4",
      f"file://{folder}",
      "is an address, and each of several hosts writes its parts of checkpoi",
    ),
  ):
    hosts, ended = both(*given, flag, port=port, output=output)
    assert [process.returncode for process in hosts] == [2, 2], ended
    assert sentence in ended[0][1]
    assert "Traceback" not in ended[0][1] + ended[1][1]


@pytest.mark.slow
def test_hosts_that_see_other_folders_are_told_so(
  tiny_directory, documents, tmp_path, port
):
  given = (f"--model={tiny_directory}", f"--documents={documents}")
  folders = [tmp_path / name for name in ("first", "second")]
  hosts = []
  for host, folder in enumerate(folders):
    folder.mkdir()
    options = {"port": port, "output": "out", "program": "finetune"}
    hosts.append(start(*FLAGS, *given, host=host, cwd=folder, **options))
  ended = [process.communicate(timeout=300) for process in hosts]
  assert [process.returncode for process in hosts] == [2, 2], ended
  assert "second/out is not the same folder on all hosts" in ended[0][1]
  assert "Traceback" not in ended[0][1] + ended[1][1]
