"""Programs whose --output is an address."""

import pytest

# What each program is told besides, and the file of its lines.
OF_PROGRAMS = {
  "evaluate": (["--benchmark=needle"], "samples"),
  "compare": ([], "samples"),
  "calibrate": (
    ["--tasks=niah_single_1", "--others=0", "--held_out=1"],
    "triples",
  ),
}


@pytest.mark.parametrize("program", OF_PROGRAMS)
def test_a_run_at_an_address_is_that_of_a_folder(
  run_binary, tiny_directory, tmp_path, program
):
  there = tmp_path / "there" / "runs"
  address = f"file://{there}"
  flags, file = OF_PROGRAMS[program]

  def sample(output, samples):
    done = run_binary(
      f"kvjax.experiments.{program}",
      f"--model={tiny_directory}",
      "--methods=streaming:sinks=2",
      "--retention=0.5",
      "--length=320",
      f"--samples={samples}",
      f"--output={output}",
      *flags,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

  def lines(folder):
    (path,) = folder.rglob(f"{file}.jsonl")
    return path.read_text().splitlines()

  sample(address, 1)
  first = lines(there)
  said = sample(address, 2)
  assert address in said
  assert "kvjax-" not in said
  assert lines(there)[: len(first)] == first
  sample(tmp_path / "here", 1)
  sample(tmp_path / "here", 2)
  assert lines(there) == lines(tmp_path / "here")
  names = [
    {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    for folder in (there, tmp_path / "here")
  ]
  assert names[0] == names[1]


def test_files_of_methods_are_made_and_read_at_addresses(
  run_binary, tiny_directory, tmp_path
):
  documents = tmp_path / "documents"
  documents.mkdir()
  for name in "abc":
    text = f"The file {name} has been read, and so have the others. "
    (documents / f"{name}.txt").write_text(text * 20)
  there = f"file://{tmp_path}/there"

  def run(program, *arguments):
    done = run_binary(
      f"kvjax.experiments.{program}", f"--model={tiny_directory}", *arguments
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

  gate, queries = f"{there}/gate", f"{there}/deep/queries.safetensors"
  read = f"--documents={documents}"
  said = run(
    *("train_gate", read, "--length=60", "--tokens=30", "--epochs=2"),
    f"--output={gate}",
  )
  assert f"the weights are in {gate}." in said
  names = {path.name for path in (tmp_path / "there" / "gate").iterdir()}
  # Nothing is left of what it has done on the way.
  assert names >= {"config.json", "model.safetensors", "run.json"}
  assert not list((tmp_path / "there" / "gate").rglob("*.safetensors"))[1:]
  said = run("calibrate_queries", read, "--length=64", f"--output={queries}")
  assert f"are in {queries}." in said
  said = run(
    *("compare", "--samples=1", "--length=320", "--retention=0.5"),
    f"--methods=kvzap:gate={gate},qfilters:filters={queries}",
    f"--output={tmp_path / 'compared'}",
  )
  assert "kvzap" in said
