"""The commands of docs/pods.md run, with processes in place of hosts."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import page_commands
import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "pods.md"
BLOCKS = page_commands.blocks(PAGE.read_text())
# They make machines and environments.
NOT_HERE = ("gcloud", "pip", "python3.12", "xpk")
# The end of each command: models and samples as small as they get.
ENDS = {
  "evaluate": "--length=320 --tasks=niah_single_1 --samples=4 "
  "--methods=full,keydiff --retention=0.5",
  "finetune": "--length=48 --epochs=2 --rank=2",
}
ANSWERS = 4 * 2
# What the page leaves out.
REST = "--model=DIR --benchmark=ruler --output=results"


def to_run(line):
  """The command of a line that runs here; None if there is none."""
  if line.split()[0] not in NOT_HERE:
    return line
  launched = re.search(r"--command='(kvjax [^']+)'", line)
  return launched and launched[1]


RUN = [[*filter(None, map(to_run, block))] for block in BLOCKS]
# By their first commands.
CASES = {(run or block)[0]: run for block, run in zip(BLOCKS, RUN, strict=True)}


@pytest.fixture
def start(tiny_directory, tmp_path, port):
  """Starts a command on a host, in a folder of its own."""
  programs = tmp_path / "bin"
  programs.mkdir()
  page_commands.write_kvjax(programs, ENDS)
  page_commands.write_program(
    programs / "python", f'exec {sys.executable} "$@"'
  )
  page_commands.write_program(programs / "ssh", 'shift; exec "$@"')
  (tmp_path / "TEXTS").mkdir()
  (tmp_path / "data").mkdir()
  (tmp_path / "OUT").mkdir()
  text = "A file is read when the others have been closed. " * 60
  (tmp_path / "TEXTS" / "a.txt").write_text(text)
  (tmp_path / "data" / "model").symlink_to(tiny_directory)
  started = []

  def run(command, host, hosts):
    folder = tmp_path / str(host)
    folder.mkdir(exist_ok=True)
    for name in ("TEXTS", "OUT", "data"):
      if not (folder / name).exists():
        (folder / name).symlink_to(tmp_path / name)
    if not (folder / "DIR").exists():
      (folder / "DIR").symlink_to(tiny_directory)
    address = f"127.0.0.1:{port}"
    command = command.replace(" ...", f" {REST}").replace("/data/", "data/")
    command = re.sub(r"--coordinator=\S+", f"--coordinator={address}", command)
    mesh = re.search(r"--mesh=(\S+)", command)
    sizes = re.findall(r"\d+", mesh[1]) if mesh else []
    devices = max(math.prod(map(int, sizes)) // hosts, 2)
    found = f"--coordinator={address} --hosts={hosts} --host={host}"
    if command.endswith("&"):
      command += "\nwait $!"  # with its code
    process = subprocess.Popen(
      ["bash", "-e", "-c", command],
      cwd=folder,
      env={
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "THIS_HOST": found if hosts > 1 else "",
        "HOSTS": "a b c d",
        "XLA_FLAGS": re.sub(
          "device_count=[0-9]+",
          f"device_count={devices}",
          os.environ["XLA_FLAGS"],
        ),
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    started.append(process)
    return process

  yield run
  for process in started:
    process.kill()


@pytest.mark.parametrize("case", CASES)
def test_commands_run(start, tmp_path, case):
  commands = CASES[case]
  if not commands:
    pytest.skip("It is for a cloud, or makes an environment.")
  running = []
  for command in commands:
    # Slices tell their hosts where the others are.
    hosts = 1
    if "--multihost" in command and "--coordinator" not in command:
      hosts = 2
    running += [start(command, host, hosts) for host in range(hosts)]
    if "--host=0" in command:
      continue  # It waits for the next one.
    ended = [process.communicate(timeout=900) for process in running]
    codes = [process.returncode for process in running]
    if command == "kvjax device_check":
      assert codes == [2]
      assert "finds no TPU or GPU here" in ended[0][1]
    else:
      assert {*codes} == {0}, ended
    running = []
  assert not running
  if any("evaluate" in command for command in commands):
    (path,) = tmp_path.glob("[0d]*/**/samples.jsonl")
    lines = path.read_text().splitlines()
    assert len(lines) == len({*lines}) == ANSWERS
    assert {json.loads(line)["method"] for line in lines} == {"full", "keydiff"}
  if any("finetune" in command for command in commands):
    assert (tmp_path / "OUT" / "model.safetensors").exists()


def test_most_blocks_have_a_command_that_runs():
  """What is left creates, describes or copies from machines."""
  left = [
    line
    for block, run in zip(BLOCKS, RUN, strict=True)
    for line in block
    if not run
  ]
  assert {line.split()[0] for line in left} == {*NOT_HERE} - {"xpk"}
  assert not any(re.search(r"\bkvjax [a-z]", line) for line in left)
