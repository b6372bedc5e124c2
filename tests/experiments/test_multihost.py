"""Two hosts share a run or a mesh; one is lost; they do not fit together."""

import json
import os
import shutil
import signal
import time

import pytest
from two_hosts import start

from kvjax.experiments.run import multihost


def answers(output):
  """Answers by sample and candidate; all but what depends on the machine."""
  (path,) = output.glob("*/samples.jsonl")
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  found = {(r["task"], r["sample"], r["method"]): r for r in lines}
  assert len(found) == len(lines)
  return found


def decided(output):
  """The same without sizes, as devices have whole pages of packed layers."""
  return {
    key: {name: value for name, value in answer.items() if "bytes" not in name}
    for key, answer in answers(output).items()
  }


def arguments(tiny_directory, samples, tasks="niah_single_1,niah_single_2"):
  return (
    *("--benchmark=ruler", f"--model={tiny_directory}", "--length=320"),
    *(f"--tasks={tasks}", f"--samples={samples}"),
    *("--methods=full,keydiff", "--retention=0.5", "--batch=1"),
  )


def test_two_hosts_answer_what_one_answers(
  run_binary, tiny_directory, tmp_path, port
):
  given = arguments(tiny_directory, samples=3, tasks="niah_single_1")
  one, two = tmp_path / "one", tmp_path / "two"
  both = [start(*given, host=h, port=port, output=two) for h in range(2)]
  ended = [process.communicate(timeout=300) for process in both]
  assert [process.returncode for process in both] == [0, 0], ended
  run_binary("kvjax.experiments.evaluate", *given, f"--output={one}")
  assert answers(two) == answers(one)
  # Three contexts: the second host has one in the first round alone.
  assert len(answers(one)) == 6
  # The first one alone prints, and its reports are those of all answers.
  assert "6 answers in" in ended[0][0]
  assert not ended[1][0]
  (summary,) = two.glob("*/summary.json")
  (expected,) = one.glob("*/summary.json")
  rows = [json.loads(path.read_text())["rows"] for path in (summary, expected)]
  assert rows[0] == rows[1]


@pytest.mark.parametrize(
  "mesh", ["data:2,model:2", "data:4", "model:4", "context:2,model:2"]
)
def test_a_mesh_of_both_hosts_answers_what_one_device_answers(
  run_binary, tiny_directory, tmp_path, port, mesh
):
  given = (
    *arguments(tiny_directory, samples=4, tasks="niah_single_1"),
    *("--methods=full,keydiff,snapkv,ada/snapkv,quest", "--batch=4"),
  )
  one, two = tmp_path / "one", tmp_path / "two"
  both = [
    start(*given, f"--mesh={mesh}", host=h, port=port, output=two)
    for h in range(2)
  ]
  ended = [process.communicate(timeout=600) for process in both]
  assert [process.returncode for process in both] == [0, 0], ended
  run_binary("kvjax.experiments.evaluate", *given, f"--output={one}")
  assert decided(two) == decided(one)
  assert len(answers(one)) == 20
  assert "20 answers in" in ended[0][0]
  assert not ended[1][0]
  # Of KV heads that do not divide.
  assert "KV heads" not in ended[1][1]
  (summary,) = two.glob("*/summary.json")
  device = json.loads(summary.read_text())["device"]
  assert device.startswith("4 x CPU")
  assert device.endswith("on 2 hosts")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "samples", "killed"),
  [((), 40, 1), ((), 40, 0), (("--mesh=model:4",), 8, 1)],
)
def test_a_run_that_has_lost_a_host_goes_on(
  tiny_directory, tmp_path, port, mesh, samples, killed
):
  given = (*arguments(tiny_directory, samples), *mesh)
  both = [start(*given, host=h, port=port, output=tmp_path) for h in range(2)]
  while not list(tmp_path.glob("*/samples.jsonl")):
    time.sleep(0.01)
    assert both[0].poll() is None, both[0].communicate()
  os.kill(both[killed].pid, signal.SIGKILL)
  ended = [process.communicate(timeout=300) for process in both]
  if killed == 1:
    assert both[0].returncode == 143
    assert ended[0][1].endswith(
      "Another host has stopped; what is done is kept, and the same command on "
      "all hosts goes on from there.\n"
    )
  # JAX aborts those who have lost the coordinator, which is host 0.
  assert both[1 - killed].returncode in (143, -signal.SIGABRT), ended
  before = answers(tmp_path)
  assert 0 < len(before) < 4 * samples
  both = [start(*given, host=h, port=port, output=tmp_path) for h in range(2)]
  ended = [process.communicate(timeout=300) for process in both]
  assert [process.returncode for process in both] == [0, 0], ended
  after = answers(tmp_path)
  assert len(after) == 4 * samples
  assert before.items() <= after.items()
  assert f"{len(before)} from before" in " ".join(ended[0][0].split())


@pytest.mark.parametrize("preempted", [0, 1])
def test_a_preempted_host_ends_all_with_the_code_of_a_restart(
  tiny_directory, tmp_path, port, preempted
):
  given = arguments(tiny_directory, samples=40)
  both = [start(*given, host=h, port=port, output=tmp_path) for h in range(2)]
  while not list(tmp_path.glob("*/samples.jsonl")):
    time.sleep(0.01)
    assert both[0].poll() is None, both[0].communicate()
  both[preempted].terminate()
  ended = [process.communicate(timeout=300) for process in both]
  assert both[preempted].returncode == 143, ended
  assert ended[preempted][1].endswith("Stopped.\n")
  if preempted == 1:
    assert both[0].returncode == 143, ended
  # JAX aborts those who have lost the coordinator, which is host 0.
  assert both[1].returncode in (143, -signal.SIGABRT), ended
  assert 0 < len(answers(tmp_path)) < 160


def test_what_one_host_refuses_ends_all_with_a_sentence_of_the_first(
  tiny_directory, tmp_path, port
):
  shutil.copytree(tiny_directory, tmp_path / "0" / "tiny")
  (tmp_path / "1").mkdir()
  given = arguments("tiny", samples=1)
  both = [
    start(*given, host=h, port=port, output="out", cwd=tmp_path / str(h))
    for h in range(2)
  ]
  said = [process.communicate(timeout=300)[1] for process in both]
  assert [process.returncode for process in both] == [2, 2], said
  assert "Host 1: " in said[0]
  assert "tiny" in said[0]
  assert "tiny" not in said[1]
  assert not list(tmp_path.glob("*/out"))


def test_a_plugin_that_one_host_lacks_is_refused_by_the_first(tmp_path, port):
  for host in range(2):
    (tmp_path / str(host)).mkdir()
  text = "import jax.numpy as jnp\nimport kvjax\n\nONES = jnp.ones(3)\n"
  named = 'kvjax.register("mine", kvjax.methods.KeyDiff, summary="mine")\n'
  (tmp_path / "0" / "mine.py").write_text(text + named)
  both = [
    start(
      *("--plugins=mine.py", "--methods=mine"),
      **{"host": h, "port": port, "output": "out", "cwd": tmp_path / str(h)},
    )
    for h in range(2)
  ]
  said = [process.communicate(timeout=300)[1] for process in both]
  assert [process.returncode for process in both] == [2, 2], said
  assert "Host 1: --plugins takes Python files; " in said[0]
  assert "mine" not in said[1]


@pytest.mark.slow
def test_what_all_hosts_refuse_is_said_once(tmp_path, port):
  both = [
    start("--methods=nonsense", host=h, port=port, output=tmp_path)
    for h in range(2)
  ]
  said = [process.communicate(timeout=300)[1] for process in both]
  assert [process.returncode for process in both] == [2, 2], said
  assert "nonsense" in said[0]
  assert "Host" not in said[0]
  assert "nonsense" not in said[1]


@pytest.mark.slow
def test_only_the_first_host_must_be_able_to_write(
  tiny_directory, tmp_path, port
):
  for host in range(2):
    (tmp_path / str(host)).mkdir()
  (tmp_path / "1" / "out").write_text("no folder")
  given = arguments(tiny_directory, samples=1, tasks="niah_single_1")
  both = [
    start(*given, host=h, port=port, output="out", cwd=tmp_path / str(h))
    for h in range(2)
  ]
  said = [process.communicate(timeout=300)[1] for process in both]
  assert [process.returncode for process in both] == [0, 0], said
  assert len(answers(tmp_path / "0" / "out")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(), ("--mesh=model:4",)])
def test_hosts_with_other_weights_are_refused_by_the_first(
  tiny_directory, tmp_path, port, mesh
):
  folders = [tmp_path / str(host) / "tiny" for host in range(2)]
  for folder in folders:
    shutil.copytree(tiny_directory, folder)
  config = folders[1] / "config.json"
  config.write_text(config.read_text() + "\n")
  both = []
  for host, folder in enumerate(folders):
    given = (*arguments("tiny", samples=1), *mesh)
    both.append(
      start(*given, host=host, port=port, output="out", cwd=folder.parent)
    )
  said = [process.communicate(timeout=300)[1] for process in both]
  assert [process.returncode for process in both] == [2, 2], said
  assert "Host 1 has other weights than host 0; give all hosts" in said[0]
  assert "Host 1" not in said[1]
  assert not list(tmp_path.glob("*/out"))


@pytest.mark.slow
def test_a_mesh_of_some_of_the_devices_of_both_is_refused_once(
  tiny_directory, tmp_path, port
):
  given = (*arguments(tiny_directory, samples=1), "--mesh=data:3")
  both = [start(*given, host=h, port=port, output=tmp_path) for h in range(2)]
  said = [process.communicate(timeout=300)[1] for process in both]
  assert [process.returncode for process in both] == [2, 2], said
  assert said[0].endswith(
    "The mesh data:3 needs 3 devices; a host has 2, and all hosts have 4.\n"
  )
  assert "data:3" not in said[1]


@pytest.mark.slow
def test_hosts_with_other_flags_are_refused_by_the_first(tmp_path, port):
  both = [
    start(f"--seed={h}", host=h, port=port, output=tmp_path) for h in range(2)
  ]
  said = [process.communicate(timeout=300)[1] for process in both]
  assert [process.returncode for process in both] == [2, 2]
  assert said[0].endswith(
    "Host 1 was started with another --seed than host 0; start all hosts with "
    "the same flags.\n"
  )
  assert "--seed" not in said[1]


def test_one_host_shares_with_nobody():
  assert (multihost.count(), multihost.is_first()) == (1, True)
  assert multihost.gather(b"alone") == [b"alone"]
  worked = multihost.share(
    [2, 0, 1], lambda n: iter([[n] * n, [n]]), bytes, list
  )
  assert list(worked) == [[2, 2], [2], [], [0], [1], [1]]
