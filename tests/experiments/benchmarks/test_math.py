"""Mathematical problems: how they are read, drawn, answered and graded."""

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest
from comparing import compare

import kvjax
from kvjax import InputError
from kvjax.experiments.benchmarks.base import Request
from kvjax.experiments.benchmarks.math import arithmetic, problems
from kvjax.experiments.benchmarks.registry import BENCHMARKS
from kvjax.experiments.metrics import math, registry
from kvjax.experiments.run import summaries
from kvjax.experiments.run.candidates import candidates, parse_budgets
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.run.results import Results, Settings

SAMPLED = Request(
  samples=2, options={"draws": 3, "temperature": 1.5, "max_new_tokens": 12}
)


@pytest.fixture
def solved(tiny, tmp_path):
  """Answers of two methods to two problems, three times each."""

  def answer(batch, name):
    drawn = BENCHMARKS["arithmetic"].draw(tiny, SAMPLED)
    chosen = candidates(
      ["full", "streaming:sinks=2"], parse_budgets(["0.5"], None)
    )
    store = Results(tmp_path / name, Settings("tiny", "0", "float32", 0))
    compare(tiny, chosen, drawn.samples, store, batch, lambda task, count: None)
    return list(store.records.values())

  return answer


@pytest.mark.parametrize(
  ("answer", "text", "right"),
  [
    ("1/2", r"so it is \boxed{\frac{1}{2}}.", True),
    ("70", r"first \boxed{7}, no: \boxed{070}", True),
    ("(3, \\frac{\\pi}{2})", r"\boxed{\left(3,\pi/2\right)}", True),
    ("14", "The final answer is 14.", True),
    ("14", "The final answer is 41.", False),
    ("14", "", False),
    ("x+1", r"\boxed{1+x}", True),
    ("x+1", r"\boxed{x-1}", False),
  ],
)
def test_answers_are_compared_as_mathematics(answer, text, right):
  assert math.is_right(text, answer) is right


def test_the_last_box_counts_with_its_braces():
  assert math.boxed(r"\boxed{1} and \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
  assert math.boxed(r"\boxed{never closed") is None
  assert math.boxed("} none {") is None
  assert math.boxed(r"\boxed {42}, that is \boxed{}") == "42"


def test_chains_are_solved_by_their_own_lines():
  for seed, steps in itertools.product(range(30), (1, 5)):
    drawn = arithmetic.problem(random.Random(seed), steps)
    examples = drawn.statement.split("Problem: ")[1:]
    last = drawn.request.removeprefix("Problem: ")
    assert eval(last) == int(drawn.answer) > 0
    for example in examples:
      chain, *lines, said = example.strip().split("\n")
      assert len(lines) == steps
      for line in lines:
        left, right = line.split(" = ")
        assert eval(left) == int(right)
      assert said == f"The final answer is {eval(chain)}."


def test_published_layouts_and_those_of_kvpress_are_read(tmp_path):
  rows = [
    {"problem": "1 + 1?", "solution": "It is 2.", "answer": "2"},
    {"question": "2 + 2?", "answer": 4},
    {
      "context": "Find 3 + 3.",
      "question": "Box it.",
      "answer_prefix": "It is",
      "answer": "6",
      "max_new_tokens": 9,
    },
  ]
  path = tmp_path / "problems.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  assert problems.read(path, None) == [
    ("1 + 1?", problems.REQUEST, "", "2", None),
    ("2 + 2?", problems.REQUEST, "", "4", None),
    ("Find 3 + 3.", "Box it.", "It is", "6", 9),
  ]
  assert len(problems.read(path, 2)) == 2
  path.write_text('{"problem": "1 + 1?"}\n')
  with pytest.raises(InputError, match=r"Line 1 of .* needs a text under 'ans"):
    problems.read(path, None)
  for name in ("problem", "answer"):
    blank = {"problem": "1 + 1?", "answer": "2"} | {name: " "}
    path.write_text(json.dumps(blank) + "\n")
    with pytest.raises(InputError, match=f"Line 1 of .* nothing under '{name}"):
      problems.read(path, None)


def test_draws_differ_and_do_not_depend_on_the_batch(solved):
  alone, together = solved(1, "alone"), solved(2, "together")
  assert len(alone) == 2 * 3 * 2

  def by_key(answers):
    return {answer.key: answer.prediction for answer in answers}

  assert by_key(alone) == by_key(together)
  full = [answer for answer in alone if answer.method == "full"]
  assert [answer.draw for answer in full] == [0, 1, 2] * 2
  assert len({answer.prediction for answer in full}) == 6
  first = {answer.asked for answer in full if answer.draw == 0}
  assert {answer.drawn_with for answer in full} == first
  assert len(first) == 2


def test_more_draws_in_a_finished_folder_are_as_if_from_the_start(
  tiny, tmp_path
):
  chosen = candidates(["full"], parse_budgets(["1"], None))

  def summary(name, *numbers):
    new = []
    store = Results(tmp_path / name, Settings("tiny", "0", "float32", 0))
    for number in numbers:
      options = {**SAMPLED.options, "draws": number}
      request = dataclasses.replace(SAMPLED, options=options)
      drawn = BENCHMARKS["arithmetic"].draw(tiny, request)
      new.append([])
      compare(
        tiny, chosen, drawn.samples, store, 2, lambda _, n: new[-1].append(n)
      )
    graded = [
      dataclasses.replace(
        answer, scores={"score": 100.0 * (int(answer.asked, 16) % 2)}
      )
      for answer in store.records.values()
    ]
    return summaries.summarize(graded), sum(new[-1])

  grown, new = summary("grown", 1, 4)
  assert new == 2 * 3
  assert grown == summary("fresh", 4)[0]


def test_seeds_draw_other_answers(tiny):
  first, second = (
    Prompt.of_sample(tiny.text, sample)
    for seed in (0, 1)
    for drawn in BENCHMARKS["arithmetic"]
    .draw(tiny, dataclasses.replace(SAMPLED, samples=1))
    .samples.values()
    for sample in [dataclasses.replace(drawn[0], seed=seed)]
  )
  assert first.context == second.context
  assert first.seed != second.seed


def test_equal_problems_of_a_file_are_one(tiny, tmp_path):
  rows = [{"problem": "1 + 1?", "answer": "2"}] * 2
  path = tmp_path / "problems.json"
  path.write_text(json.dumps(rows))
  request = Request(
    data=str(path), options={"max_new_tokens": 4, "temperature": 0.0}
  )
  drawn = BENCHMARKS["math500"].draw(tiny, request)
  assert drawn.checked().notes[-1].startswith("Of 2 samples of math500, 1 ")
  store = Results(tmp_path / "out", Settings("tiny", "0", "float32", 0))
  counts = []
  compare(
    tiny,
    candidates(["full"], parse_budgets(["1"], None)),
    drawn.samples,
    store,
    2,
    lambda task, number: counts.append(number),
  )
  assert sum(counts) == 1
  lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
  assert len(lines) == 1


def test_answers_fit_the_context_unless_their_length_is_given(tiny, tmp_path):
  path = tmp_path / "problems.json"
  path.write_text(json.dumps([{"problem": "1 + 1?", "answer": "2"}]))
  (part,) = BENCHMARKS["aime25"].draw(tiny, Request(data=str(path))).samples
  assert 300 < part.length < 512


def test_answers_that_are_cut_off_are_wrong_unless_boxed(tiny):
  drawn = BENCHMARKS["arithmetic"].draw(tiny, Request(samples=1))
  ((sample,),) = drawn.samples.values()
  sample = dataclasses.replace(sample, metadata={})
  (answer,) = sample.answers

  def graded(text, is_cut):
    scores = registry.score(sample, text, is_cut)
    return scores["score"], scores["cut"]

  assert graded(f"It may be {answer}", False) == (1.0, 0.0)
  assert graded(f"It may be {answer}", True) == (0.0, 1.0)
  assert graded(rf"\boxed{{{answer}}} or", True) == (1.0, 0.0)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(solved):
  answers = [a for a in solved(2, "graded") if a.method == "full"]
  rng = np.random.default_rng(0)
  graded = [
    dataclasses.replace(
      answer,
      scores={"score": 100.0 * int(rng.integers(2))},
      draw=draw,
      first_draw=f"problem {problem}",
    )
    for problem in range(5)
    for draw, answer in enumerate(answers[:3])
  ]
  (row,) = summaries.summarize(graded)
  right = np.array([answer.score == 100 for answer in graded]).reshape(5, 3)
  for k in (2, 3):
    subsets = list(itertools.combinations(range(3), k))
    found = np.mean([right[:, subset].any(axis=1) for subset in subsets])
    assert row["scores"][f"pass@{k}"] == round(100 * found, 2)
  assert row["score"] == round(100 * right.mean(), 2)


def test_bytes_while_decoding_are_those_that_generate_allocates(tiny, solved):
  """The size of the cache that stays after an answer of the same length."""
  answer = next(a for a in solved(1, "bytes") if a.method == "full")
  drawn = BENCHMARKS["arithmetic"].draw(tiny, SAMPLED)
  sample = next(iter(drawn.samples.values()))[0]
  prompt = Prompt.of_sample(tiny.text, sample)
  cache, _ = kvjax.prefill(
    tiny.model,
    tiny.params,
    kvjax.Prompts.of([prompt.context], -(-len(prompt.context) // 32) * 32),
    kvjax.get_plan("full", kvjax.Retention(1.0)),
  )
  decoding = kvjax.Decoding(12).rounded
  width = -(-len(prompt.question) // 8) * 8
  larger = kvjax.reserve(cache, width + decoding.max_new_tokens)
  assert answer.decoding_bytes == larger.nbytes
  assert answer.cache_bytes == cache.nbytes
  found = kvjax.decoding_nbytes(tiny.model, cache, width, decoding)
  assert found == larger.nbytes


@pytest.mark.parametrize(
  ("name", "request_", "sentence"),
  [
    (
      "math500",
      Request(),
      "math500 is read from disk; give its file by --data",
    ),
    (
      "arithmetic",
      Request(options={"draws": 2}),
      "--draws=2 needs a --temperature above 0",
    ),
    (
      "arithmetic",
      Request(options={"draws": 2, "top_k": 5}),
      "--top_k needs a --temperature above 0",
    ),
    (
      "aime25",
      Request(data="file", options={"temperature": float("nan")}),
      "temperature must be a finite number",
    ),
  ],
)
def test_what_cannot_be_drawn_is_refused_at_once(name, request_, sentence):
  with pytest.raises(InputError, match=sentence):
    BENCHMARKS[name].check(request_)


def test_what_follows_an_answer_does_not_count(tiny):
  drawn = BENCHMARKS["arithmetic"].draw(tiny, Request(samples=1))
  ((sample,),) = drawn.samples.values()
  (answer,) = sample.answers
  said = f"The final answer is {answer}.\n\nProblem: 1 + 1\nIt is 999."
  assert registry.score(sample, said)["score"] == 1.0


@pytest.mark.parametrize(
  ("template", "chat", "thinking"),
  [
    (None, True, False),
    ("chat", True, False),
    ("thinking", True, True),
    ("none", False, False),
  ],
)
def test_a_template_thinks_only_if_asked_to(
  template, chat, thinking, tiny, tmp_path
):
  path = tmp_path / "problems.json"
  path.write_text(json.dumps([{"problem": "1 + 1?", "answer": "2"}]))
  request = Request(data=str(path), options={"template": template})
  drawn = BENCHMARKS["math500"].draw(tiny, request)
  ((sample,),) = drawn.samples.values()
  assert (sample.chat, sample.thinking) == (chat, thinking)
  assert drawn.data["template"] == (template or "chat")


def test_a_prompt_is_protected_only_if_asked_to(tiny):
  for options, protected in (({}, False), ({"protect": "prompt"}, True)):
    drawn = BENCHMARKS["arithmetic"].draw(
      tiny, Request(samples=1, options=options)
    )
    ((sample,),) = drawn.samples.values()
    prompt = Prompt.of_sample(tiny.text, sample)
    assert sample.protected == prompt.protected == protected
    assert drawn.data.get("protected") == ("prompt" if protected else None)
