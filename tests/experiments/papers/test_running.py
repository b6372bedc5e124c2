"""A part runs to its end, goes on where it stopped, and is told about."""

import dataclasses
import json
import pathlib

import pytest
import rich.console

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.benchmarks.ruler import generator
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.papers import execution, running
from kvjax.experiments.papers.analyses import prompt_lengths
from kvjax.experiments.papers.data_model import Analysis, Experiment, Key, Setup
from kvjax.experiments.papers.registry import EXPERIMENTS
from kvjax.experiments.papers.setup_samples import Sources, draw
from kvjax.experiments.tasks import passkey
from kvjax.experiments.tasks.sample import in_words


def experiment(*parts, **fields):
  return Experiment(
    "E9.9",
    "A paper",
    "nothing",
    "A model",
    "LongBench",
    "needles",
    1,
    parts,
    **fields,
  )


@pytest.mark.slow
def test_an_experiment_runs_and_tells_what_it_is_not(
  session, invented, tmp_path, capsys
):
  prompts = Setup("ruler", ("niah_single_2",), (256,), 2)
  # One length and two lines are compiled in a third of the time.
  small = dataclasses.replace(invented.small, lengths=(256,))
  lines = tuple(line for line in invented.lines if line.name != "Sinks")
  invented = dataclasses.replace(
    invented, small=small, lines=lines, quoted=("Other", "Sinks")
  )
  own = experiment(
    invented,
    Analysis("lengths", prompt_lengths.measure, prompts, prompts),
    claims=("Ours is best.",),
    remarks=("Nobody knows.",),
  )
  console = rich.console.Console(width=120, record=True)
  execution.foresee(own, session, tmp_path, console)
  assert not list(tmp_path.iterdir())
  # Before it measures.
  assert capsys.readouterr().err.startswith("2 contexts of")
  foreseen = " ".join(console.export_text().split())
  assert "Invented: 2 contexts of" in foreseen
  assert "4 answers to questions of" in foreseen
  assert "Nothing was written. lengths: 2 prompts of" in foreseen

  execution.run(own, session, tmp_path, console)
  lines = (tmp_path / "invented_ruler" / "samples.jsonl").read_text()
  answers = [json.loads(line) for line in lines.splitlines()]
  # Two caches (full, ours) of two samples.
  assert len(answers) == 4
  assert {answer["protocol"] for answer in answers} == {"query-aware"}
  assert {answer["seed"] for answer in answers} == {3}
  text = (tmp_path / "paper.md").read_text()
  # Both parts ran under the same circumstances.
  assert text.count("tiny on generated data") == 1
  for part in (
    "# E9.9 A paper: nothing",
    "tiny on generated data: not the paper's model; its numbers are not ",
    "The paper ran A model and used LongBench.",
    "**Invented: of two kinds (ours: mean of niah_single_1, niah_single_2)**",
    "Full is full; Ours is keydiff.",
    "Everything is smaller.",
    "Other?: nobody knows what it was.",
    "4 answers in",
    "| niah_single_2 | 2 |",
    "The paper: Ours is best.",
    "Nobody knows.",
  ):
    assert part in text
    shown = part.strip("#* ")
    # A console breaks its lines where they are full.
    said = " ".join(console.export_text(clear=False).split())
    assert part[0] == "|" or shown in said
  cells = json.loads((tmp_path / "paper.json").read_text())
  assert cells[0]["part"] == "Invented"

  again, notes = running.compare(invented, session, tmp_path)
  assert notes[-1].startswith("0 answers in")
  assert "4 from before" in notes[-1]
  key = Key("Ours", "short", "of two kinds")
  (cell,) = [
    c for c in cells if (c.get("line"), c.get("column"), c.get("what")) == key
  ]
  assert cell["ours"] == again.ours[key].score


def test_random_choices_have_the_seed_of_the_session(session, invented):
  """The session's is 3, as --seed would be."""
  line = dataclasses.replace(
    invented.lines[-1], small=invented.lines[-1].small._replace(method="random")
  )
  cells = running._plan(
    dataclasses.replace(invented, lines=(line,)), session, pathlib.Path("no")
  ).cells
  methods = [cell.plan.method for cell in cells.values() if cell is not None]
  assert [method.seed for method in methods] == [3, 3]


def test_the_papers_scale_needs_model_and_data(invented, tmp_path):
  data = Sources(data=tmp_path)
  scale = running.scale_of
  assert scale(invented, False, Sources()) == "small"
  assert scale(invented, True, Sources()) == "small"
  assert scale(invented, True, data) == "paper"
  made = dataclasses.replace(invented, paper=invented.small)
  assert scale(made, False, Sources()) == "small"
  assert scale(made, True, Sources()) == "paper"


def test_the_user_may_ask_for_more_samples_and_other_lengths(session, invented):
  more = session._replace(samples=7)
  assert running.setup_of(invented, more).samples == 7
  longer = session._replace(length=300)
  with pytest.raises(InputError, match="--length does not go with"):
    running.setup_of(invented, longer)
  budgets = tuple(
    dataclasses.replace(c, small=c.small and c.small._replace(length=None))
    for c in invented.columns
  )
  one = dataclasses.replace(invented, columns=budgets)
  assert running.setup_of(one, longer).lengths == (300,)


def test_the_user_may_choose_some_of_the_tasks(session, invented):
  one = session._replace(tasks=["niah_single_2"])
  assert running.setup_of(invented, one).tasks == ("niah_single_2",)
  other = session._replace(tasks=["qasper"])
  with pytest.raises(InputError, match="There is no task 'qasper'"):
    running.setup_of(invented, other)


def test_lengths_in_words_become_those_of_the_tokenizer(session, invented):
  words = Setup("passkey", ("passkey",), (20, 40), 1, in_words=True)
  one = dataclasses.replace(invented, small=words, columns=())
  short, long = running.setup_of(one, session).lengths
  # A word has at least a token; an answer has 256.
  assert 256 + 64 + 40 < short < long - 20
  asked = session._replace(length=700)
  assert running.setup_of(one, asked).lengths == (700,)


@pytest.mark.parametrize("benchmark", ["needle", "passkey", "multiturn"])
def test_needles_are_hidden_in_the_users_prose(
  benchmark, tiny, session, monkeypatch
):
  # Eight turns are longer than the tiny model's context.
  monkeypatch.setattr(run_inputs, "check_lengths", lambda lm, lengths: None)
  essay = tuple(f"Tale {number} is of the sea." for number in range(50))
  texts = dataclasses.replace(
    generator.Texts.read(),
    essay=essay,
    origins={"essay": "tales", "words": "own"},
  )
  turns = Setup(benchmark, (benchmark,), (700,), 1, depths=1)
  drawn = draw(turns, "small", tiny, Sources(texts=texts), 0)
  for samples in drawn.samples.values():
    assert all(" is of the sea." in sample.context for sample in samples)
  assert drawn.data["essay"] == "tales"
  assert list(drawn.about) == ["distinct sentences in haystacks of 700 tokens"]
  words = Setup("passkey", ("passkey",), (20,), 1, in_words=True)
  own = session._replace(sources=Sources(texts=texts))
  count, pieces = tiny.text.count, " ".join(essay)
  per_word = count(pieces) / len(pieces.split())
  part = Analysis("lengths", prompt_lengths.measure, words, words)
  assert running.setup_of(part, own).lengths[0] == (
    passkey.length_of_words(0, count) + round(20 * per_word)
  )


def test_lengths_beyond_the_models_context_are_left_out(session, invented):
  """The tiny model's is 512 tokens."""
  far = dataclasses.replace(invented.small, lengths=(256, 600))
  setup, (note,) = running.within_context(far, session)
  assert setup.lengths == (256,)
  assert note.startswith("600 tokens are left out: with the chat template ")
  cells = running.cells_of(invented, "small", setup)
  assert {column.name for (_, column), own in cells.items() if own} == {"short"}
  # Nothing is left to be asked, or the user wants it: it is refused later.
  none = dataclasses.replace(far, lengths=(600, 700))
  assert running.within_context(none, session) == (none, [])
  wanted = session._replace(length=600)
  assert running.within_context(far, wanted) == (far, [])


def test_an_analysis_is_small_where_no_length_fits(session):
  """The tiny model's context is 512 tokens."""
  own = session._replace(own_model=True)

  def analysis(*lengths):
    long = Setup("ruler", ("niah_single_2",), lengths, 1)
    small = Setup("ruler", ("niah_single_2",), (256,), 1)
    return Analysis("lengths", prompt_lengths.measure, long, small)

  assert running.scale_here(analysis(300, 4096), own) == "paper"
  assert running.scale_here(analysis(4096), own) == "small"
  assert running.setup_of(analysis(4096), own).lengths == (256,)
  # It is refused if it was asked for.
  asked = own._replace(length=4096)
  assert running.scale_here(analysis(300), asked) == "paper"


def _with_context(session, tokens):
  """A session of the user's own model, with a context of that length."""
  model = session.lm.model
  geometry = dataclasses.replace(model.geometry, max_positions=tokens)
  model = dataclasses.replace(model, geometry=geometry)
  lm = dataclasses.replace(session.lm, model=model)
  return session._replace(lm=lm, own_model=True)


def test_prompts_of_longbench_are_cut_to_the_models_context(session, invented):
  own = _with_context(session, 4096)
  setup, (note,) = running.within_context(invented.paper, own)
  assert setup.lengths == (3500,)
  assert note == (
    "Prompts are cut to 3500 tokens; the experiment's are longer than the "
    "context of this model, 4096 tokens."
  )
  longer = own._replace(length=7500)
  assert running.within_context(invented.paper, longer)[0] == invented.paper


def test_prompt_lengths_are_those_of_whole_prompts(session, tmp_path):
  """Here longer than the context of the tiny model, 512 tokens."""
  row = {"context": "word " * 900, "input": "Why?", "answers": ["So."]}
  (tmp_path / "qasper.jsonl").write_text(json.dumps(row) + "\n")
  own = session._replace(
    own_model=True, sources=Sources(data=tmp_path), samples=1
  )
  (analysis,) = EXPERIMENTS["E2.9"].parts
  (table,) = running.analyze(analysis, own, tmp_path).tables
  task, prompts, tokens, *shares = table.lines[0]
  assert (task, prompts, shares[0]) == ("qasper", "1", "1.00")
  assert 900 < int(tokens) < 2048
  (other, *_) = EXPERIMENTS["E2.7"].parts
  with pytest.raises(InputError, match="has no narrativeqa; it holds qasper"):
    running.analyze(other, own._replace(length=400), tmp_path)


def test_longbench_is_asked_and_scored_as_by_its_own_code(session, tmp_path):
  row = {"context": "word " * 90, "input": "Why?", "answers": ["So."]}
  for name in ("qasper", "qmsum"):
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
  setup = Setup("longbench", ("qasper", "qmsum"), (400,), None)
  sources = Sources(data=tmp_path)

  def drawn(protocol):
    found = draw(setup, "paper", session.lm, sources, 0, protocol)
    return [s for part in found.samples.values() for s in part], found.data

  (paper, meeting), data = drawn("query-aware")
  assert meeting.metric == "rouge_official"
  assert paper.question.endswith("Answer:")
  assert not paper.answer_prefix
  assert data["metrics"] == "LongBench's own code, faults included"
  assert data["start of the answer"] == "in the user's turn"
  (paper, _), data = drawn("query-agnostic")
  assert paper.answer_prefix == "Answer:"
  assert "start of the answer" not in data


@pytest.fixture
def problems(tmp_path):
  rows = [
    {"problem": f"What is {n} + 1?", "answer": f"{n + 1}"} for n in range(2)
  ]
  path = tmp_path / "math500.jsonl"
  path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  return Sources(data=path)


def test_problems_of_mathematics_are_asked_as_evaluate_asks_them(
  session, problems, tmp_path
):
  comparison, longer = EXPERIMENTS["E2.14"].parts
  assert running.scale_of(comparison, True, Sources()) == "small"
  own = _with_context(session, 16_384)._replace(sources=problems)
  planned = running._plan(comparison, own, tmp_path)
  assert planned.scale == "paper"
  ((part, samples),) = planned.drawn.samples.items()
  assert part == ("math500", 4096)
  assert [sample.context for sample in samples] == [
    "What is 0 + 1?",
    "What is 1 + 1?",
  ]
  assert samples[0].chat
  assert planned.job.settings.data["answers"] == in_words(samples[0].sampling)
  assert planned.job.settings.schedule == str(kvjax.Schedule(every=1))
  assert {(each.method, each.budget) for each in planned.job.chosen} == {
    ("full", "1"),
    *(
      (method, f"{count} tokens")
      for method in ("keydiff:recent_frac=0.2", "snapkv.keydiff")
      for count in (1024, 2048)
    ),
  }
  planned = running._plan(longer, own, tmp_path)
  assert [*planned.drawn.samples] == [("math500", 8192)]
  with pytest.raises(InputError, match="--length does not go with mathemat"):
    running._plan(comparison, own._replace(length=64), tmp_path)
  # Arithmetic takes their place, in prompts without a chat template.
  planned = running._plan(comparison, session._replace(samples=3), tmp_path)
  (samples,) = planned.drawn.samples.values()
  assert [sample.task for sample in samples] == ["arithmetic"] * 3
  assert {sample.max_new_tokens for sample in samples} == {128}
  assert not any(sample.chat for sample in samples)
  assert running._plan(longer, session, tmp_path) is None


def test_answers_longer_than_the_models_context_are_left_out(
  session, problems, tmp_path
):
  """The others run: an experiment does not end at one of its parts."""
  comparison, longer = EXPERIMENTS["E2.14"].parts
  own = _with_context(session, 8192)._replace(sources=problems)
  assert running._plan(comparison, own, tmp_path) is not None
  assert running._plan(longer, own, tmp_path) is None
  assert execution.left_out(longer, own) == (
    "8K tokens is left out: with the chat template, answers of 8192 tokens are "
    "longer than the context of this model, 8192 tokens."
  )
  assert execution.left_out(longer, session) == (
    "8K tokens is left out: only the paper's models reach it."
  )


@pytest.mark.slow
def test_answers_of_mathematics_are_compared_with_the_papers(
  session, problems, tmp_path
):
  comparison, _ = EXPERIMENTS["E2.14"].parts
  setup = dataclasses.replace(comparison.paper, new_tokens=24)
  columns = tuple(
    dataclasses.replace(column, paper=column.paper._replace(budget=budget))
    for column, budget in zip(
      comparison.columns, (kvjax.Tokens(40), kvjax.Tokens(48)), strict=True
    )
  )
  short = dataclasses.replace(comparison, paper=setup, columns=columns)
  own = session._replace(own_model=True, sources=problems)
  found, _ = running.compare(short, own, tmp_path / "run")
  assert {key.what for key in found.ours} == {"flexible match", "exact match"}
  assert len(found.ours) == 2 * 2 * len(short.lines)
  assert {number.samples for number in found.ours.values()} == {2}
  (llama, qwen) = found.comparison.targets
  key = Key("KeyDiff", "N = 1,024", "flexible match")
  assert (llama.numbers[key], qwen.numbers[key]) == (69.5, 66.6)


def test_what_cannot_be_run_says_why():
  console = rich.console.Console(width=120, record=True)
  execution.refuse(
    experiment(why_not="It is secret.", claims=("All is well.",)), console
  )
  text = console.export_text()
  assert "This cannot be run. It is secret." in text
  assert "The paper: All is well." in text


@pytest.mark.parametrize("run", [execution.run, execution.foresee])
def test_without_a_stand_in_a_part_is_left_out(
  session, invented, tmp_path, run
):
  none = dataclasses.replace(invented, small=None)
  console = rich.console.Console(width=120, record=True)
  run(experiment(none), session, tmp_path, console)
  assert "Invented is left out" in console.export_text()
