"""Tables of benchmarks, and the pages that show them as they are written."""

import pathlib
import re

import page_commands
import pytest

from kvjax.errors import InputError
from kvjax.experiments.compilation import peer_table
from kvjax.experiments.peers import paired_times
from kvjax.experiments.report import (
  benchmark_tables,
  costs,
  formats,
  page_parts,
)
from kvjax.experiments.report.formats import Table
from kvjax.experiments.timing import (
  compile_timing,
  decode_timing,
  eviction_timing,
  kernel_tables,
  scaling,
  sparse_timing,
  sweep_timing,
)

ROOT = pathlib.Path(__file__).parents[3]
TABLE = Table("", ("method", "ms"), [("keydiff", "1.0"), ("a:b=1", "20.0")])
PAGE = "# A\n\n<!-- new -->\nold\n<!-- /new -->\n\n<!-- b -->\n<!-- /b -->\n"


def of_lengths(*lengths):
  """The columns of the scaling table."""
  values = dict.fromkeys(lengths, 1)
  names = ("a", scaling.ATTENTION)
  results = [scaling.Scaled(name, values, values) for name in names]
  return scaling.table(results).header


def of_depths(*layers):
  """The columns of the compile table."""
  timed = [compile_timing.Timed("a", n, 2.0, 1.0) for n in layers]
  return compile_timing.table(timed).header


# What the programs write; those of peers may lack some columns.
COLUMNS = {
  "kernels": kernel_tables.HEADING,
  "decode": decode_timing.HEADING,
  "evictions": eviction_timing.HEADING,
  "sparse": sparse_timing.HEADING,
  "sparse_128k": sparse_timing.HEADING,
  "scaling": of_lengths(1024, 2048, 4096, 8192, 16384),
  "compile": of_depths(4, 32),
  "compile_sweep": of_depths(30),
  "sweep": sweep_timing.HEADING,
  "peers_leaderboard": ("leaderboard", *paired_times.HEADING),
  "peers_prefill": ("prefill", *paired_times.HEADING),
  "peers_prefill_5000": ("prefill", *paired_times.HEADING),
  "peers_prefill_8000": ("prefill", *paired_times.HEADING),
  "peers_prefill_random": ("prefill", *paired_times.HEADING),
  "peers_prefill_xeon": ("prefill", *paired_times.HEADING),
  "peers_prefill_5000_xeon": ("prefill", *paired_times.HEADING),
  "peers_decode": ("decode", *paired_times.HEADING),
  "peers_decode_xeon": ("decode", *paired_times.HEADING),
  "peers_compress": ("compress", *paired_times.HEADING),
}
PAGES = {
  name: page_commands.joined((ROOT / "docs" / page).read_text("utf-8"))
  for name in COLUMNS
  for page in (
    "methods/decoding.md" if name == "evictions" else "performance.md",
  )
}


def part(name):
  """What a page has between its marks."""
  (found,) = re.findall(
    rf"^<!-- {name} -->\n(.*?)^<!-- /{name} -->$", PAGES[name], re.M | re.S
  )
  return found


def test_all_tables_of_the_page_are_known():
  page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
  found = re.findall(r"^<!-- (\w+) -->$", page, re.MULTILINE)
  # That of peers' kernels has a test of its own.
  assert {*found, "evictions"} == {*COLUMNS, peer_table.PART}
  # Others say where kernels apply, what a GPU did (below), and why no kernel of
  # JAX replaces ours.
  shown = [line for line in page.splitlines() if line.startswith("| :--")]
  assert len(shown) == len(found) + 4


@pytest.mark.parametrize("name", COLUMNS)
def test_pages_have_what_programs_write(name):
  """The table and the sentence below it, written again, are the same."""
  table, _, about = part(name).partition("\n\n")
  header, _, *lines = (
    line.removeprefix("| ").removesuffix(" |").split(" | ")
    for line in table.splitlines()
  )
  columns = COLUMNS[name]
  if name.startswith("peers_"):
    columns = [column for column in columns if column in header]
  assert header == list(columns)
  code = lines[0][0].startswith("`")
  cells = [[line[0].strip("`"), *line[1:]] for line in lines]
  written = benchmark_tables.markdown(
    Table("", header, cells), " ".join(about.split()), code
  )
  assert written == part(name)


@pytest.mark.parametrize("name", COLUMNS)
def test_the_command_before_a_table_writes_it(name):
  before = PAGES[name].partition(f"<!-- {name} -->")[0]
  *_, (program, flags) = re.findall(
    r"^ {4}(?:python -m kvjax\.experiments\.|kvjax )(\w+)(.*)$",
    before,
    re.MULTILINE,
  )
  source = (ROOT / "experiments" / f"{program}.py").read_text(encoding="utf-8")
  (usual,) = re.findall(r'DEFINE_string\(\s*"output", "([\w/]+)"', source)
  output = re.findall(r"--output=(\S+)", flags) or [usual]
  assert output == [f"results/{name}"]


RESULTS = page_commands.joined(
  (ROOT / "docs" / "results.md").read_text("utf-8")
)
# Marks of runs, and the command before each.
RUNS = re.findall(
  r"^    (?:make|kvjax) ([^\n]+)\n(?:(?!^    )[^\n]*\n)*?"
  r"<!-- ([\w-]+) -->\n(.*?)<!-- /\2 -->$",
  RESULTS,
  re.MULTILINE | re.DOTALL,
)


def test_every_marked_table_of_scores_follows_its_command():
  marks = re.findall(r"^<!-- ([\w-]+) -->$", RESULTS, re.MULTILINE)
  assert [name for _, name, _ in RUNS] == marks
  assert len(marks) > 5


@pytest.mark.parametrize(
  ("command", "name", "shown"), RUNS, ids=[name for _, name, _ in RUNS]
)
def test_a_table_of_scores_has_the_form_and_the_folder_of_its_run(
  command, name, shown
):
  (folder,) = re.findall(r"--output=results/([\w-]+)", command) or re.findall(
    r"^leaderboard LENGTHS=(\d+)", command
  )
  assert folder == name
  header, _, *lines = (
    line.removeprefix("| ").removesuffix(" |").split(" | ")
    for line in shown.partition("\n\n")[0].splitlines()
  )
  assert header[0] == "method"
  if header[1] != "budget":  # What methods cost has columns of its own.
    assert all(name.endswith(" %") for name in header[1:])
  cells = [[line[0].strip("`"), *line[1:]] for line in lines]
  table = formats.to_markdown(Table("", header, cells), code=True)
  assert shown.startswith(table)


def test_scores_of_a_run_are_put_into_their_page(
  tmp_path, monkeypatch, answer, record
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "docs").mkdir()
  page = tmp_path / "docs" / "b.md"
  page.write_text(PAGE)
  answers = [answer(sample=n, score=100.0 * (n % 2)) for n in range(12)]
  full = [answer("full", sample=n) for n in range(12)]
  record([*full, *answers], tmp_path / "new")
  page_parts.main(["new"])
  table, about = page.read_text().split("<!-- /new -->")[0].split("\n\n")[1:]
  assert table.splitlines()[1:] == [
    *("| method | 100 % | 25 % |", "| :-- | --: | --: |"),
    *("| `full` | 100.0 (76–100) |  |", "| `keydiff` |  | 50.0 ±25 |"),
  ]
  for said in (
    "Percentage of answers found, ± the longer half of its 95 % interval",
    *(": niah_single_1; tiny, 1024 tokens", "12 samples per task. Seed 7"),
    "jax 1.2.3.",
  ):
    assert said in " ".join(about.split())


def test_a_run_of_several_lengths_has_no_single_table(record, answer):
  run = record([answer(length=length) for length in (1024, 2048)])
  with pytest.raises(InputError, match="somewhere has several lengths"):
    page_parts.scores(run)


def test_a_table_is_printed_and_put_into_its_page(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "docs" / "methods").mkdir(parents=True)
  (tmp_path / "docs" / "a.md").write_text("<!-- new -->\nof no end\n")
  page = tmp_path / "docs" / "methods" / "b.md"
  page.write_text(PAGE)
  folder = tmp_path / "results" / "new"
  benchmark_tables.show(folder, TABLE, "Median of 3 rounds", code=True)
  assert "a:b=1" in capsys.readouterr().out
  page_parts.main([str(folder)])
  table, about = page.read_text().split("<!-- /new -->")[0].split("\n\n")[1:]
  assert table.splitlines() == [
    *("<!-- new -->", "| method | ms |", "| :-- | --: |"),
    *("| `keydiff` | 1.0 |", "| `a:b=1` | 20.0 |"),
  ]
  assert re.fullmatch(r"Median of 3 rounds; python 3\.[^;]*\.\n", about)
  assert "jax 0." in " ".join(about.split())
  assert page.read_text().endswith("\n<!-- b -->\n<!-- /b -->\n")
  assert (tmp_path / "docs" / "a.md").read_text().endswith("of no end\n")


def test_tables_without_a_place_are_refused_before_a_page_is_changed(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "docs").mkdir()
  (tmp_path / "docs" / "b.md").write_text(PAGE)
  for name in ("new", "c"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "table.md").write_text("x\n")
  for folders, said in {
    (): "Name the folders",
    ("new", "c"): "No page in docs has the marks <!-- c --> and <!-- /c -->",
    ("new", "d"): "d/table.md cannot be read",
  }.items():
    with pytest.raises(InputError, match=said):
      page_parts.main(folders)
  assert (tmp_path / "docs" / "b.md").read_text() == PAGE
  page_parts.main(["new"])
  changed = (tmp_path / "docs" / "b.md").read_text()
  assert changed == PAGE.replace("old", "x")


def test_names_of_methods_are_code_in_a_page():
  assert "| `a:b=1` |" in formats.to_markdown(TABLE, code=True)
  assert "| a:b=1 |" in formats.to_markdown(TABLE)


def test_speeds_have_one_number_where_they_round_to_it():
  assert benchmark_tables.speeds([4.41e9, 4.4e9]) == "4.4 GB/s"
  assert benchmark_tables.speeds([7.4e9, 5.2e9, 6e9]) == "5.2 to 7.4 GB/s"


def of_a_gpu(name):
  """What was printed on a GPU, and its lines split into words."""
  path = ROOT / "docs" / "measured" / "h200" / f"{name}.txt"
  output = path.read_text(encoding="utf-8")
  return output, [line.split() for line in output.splitlines()]


def rows_with(text):
  """The cells of the page's lines with a text."""
  page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
  return [
    [cell.strip().strip("`") for cell in line.strip("|").split("|")]
    for line in page.splitlines()
    if text in line and line.startswith("|")
  ]


@pytest.mark.parametrize(
  ("prompts", "name", "count"),
  [("32 x 8,192", "batch", 3), ("4 x 32,704", "decode_32k", 4)],
)
def test_what_a_gpu_decodes_is_its_output(prompts, name, count):
  _, words = of_a_gpu(name)
  rows = rows_with(f"| {prompts} |")
  assert len(rows) == count
  for _, method, budget, size, *rest in rows:
    (found,) = [line for line in words if line and line[0] == method]
    *kept, mib, _, step, speed, ratio, share = found[1:]
    assert " ".join(kept) == budget
    assert round(float(mib.replace(",", ""))) == int(size.replace(",", ""))
    assert [step, speed, ratio, share] == rest


def test_what_a_gpu_decodes_without_copies_is_its_output():
  lines = rows_with("cuBLAS | `")
  assert len(lines) == 4
  # Of Llama-3.1-8B's weights, the embedding is not read.
  embedding = 128_256 * 4096 * 2
  for products, method, budget, size, step, speed, share in lines:
    name = "triton" if "Triton" in products else "cublas"
    output, words = of_a_gpu(f"decode_{name}")
    (row,) = [line for line in words if line and line[0] == method]
    assert row[1:3] == [budget, f"{size}.00"]
    assert row[4:6] == [step, speed]
    (copies,) = re.findall(r"copies moved ([\d,.]+)", output)
    speed = 1e9 * float(copies.replace(",", ""))
    moved = float(row[7]) / 100 * speed * float(step) / 1e3
    assert round(float(row[7]) * (1 - embedding / moved)) == int(share)


def timed(run):
  """The run, with times that grow with its rows."""
  rows = [
    row | {"prefill_seconds": 1.5 * n, "token_seconds": 0.01}
    for n, row in enumerate(run.summary["rows"], start=1)
  ]
  return run._replace(summary={**run.summary, "rows": rows})


def test_what_methods_cost_is_shown_by_length(record, answer):
  lengths = (1024, 2048)
  answers = [
    *(answer("full", length=length) for length in lengths),
    *(answer(length=length) for length in lengths),
    answer("late", length=2048),
  ]
  run = record(answers)
  assert not costs.are_known(run)
  run = timed(run)
  assert costs.are_known(run)
  assert not costs.are_known(run.at(length=1024))
  table = costs.table(run)
  assert table.header == [
    *("method", "budget", "1,024: MiB", "1,024: ms", "2,048: MiB", "2,048: ms")
  ]
  seconds = {
    (row["method"], row["length"]): row["prefill_seconds"]
    for row in run.summary["rows"]
  }
  names = ("full", "keydiff", "late")
  fastest = min(names, key=lambda name: seconds[name, 2048])
  assert table.lines[0][0] == fastest
  for line in table.lines:
    times = [seconds.get((line[0], length)) for length in lengths]
    shown = ["–" if x is None else f"{1e3 * x:,.0f}" for x in times]
    assert [line[3], line[5]] == shown
  shown = page_parts.of_costs(run)
  assert "from the prompt to it" in " ".join(shown.split())
  assert shown.startswith("| method | budget | 1,024: MiB |")
