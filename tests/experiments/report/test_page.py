"""Pages that need nothing beside them, and let no name become markup."""

import html.parser
import re

import pytest

from kvjax.experiments.report import page, ranking
from kvjax.experiments.report.excerpts import excerpts


class Checked(html.parser.HTMLParser):
  """Refuses what is not closed; keeps tags, attributes and text."""

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.attributes, self.texts = [], [], [], []
    self.feed(text)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs
    if tag not in ("meta", "img", "wbr"):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.texts.append(data)


def check_self_contained(text):
  found = Checked(text)
  assert "link" not in found.tags
  for name, value in found.attributes:
    assert name != "href"
    assert not name.startswith("on")
    assert name != "src" or value.startswith("data:image/png;base64,")
  assert not re.search(r"url\(|@import|fetch|https?:", text)
  return found


def test_a_page_tells_all_and_runs_nothing_of_what_it_shows(answer, record):
  evil = '<script>alert("x")</script>&amp;'
  found = record(
    [
      answer("full", question=evil, answers=[evil]),
      answer(f"a{evil}:b", prediction=evil),
    ],
    model=evil,
    data={"essay": evil},
    kv_dtype="int8",
  )
  text = page.of_run(found, {"score_vs_bytes_512.png": b"png"})
  shown = check_self_contained(text)
  assert shown.tags.count("script") == 1
  assert (
    text.index('class="headline"') < text.index("<table") < text.index("<img")
  )
  words = "".join(shown.texts)
  assert words.count(evil) >= 8
  for fact in (
    *("query-agnostic", "whole prompt, per kv head, kept in int8"),
    "1 per task and length",
    *("CPU, 2 cores, float32", "python 3.12.1, jax 1.2.3", "abc123", "greedy"),
    "Score against the bytes of a cache, 512 tokens",
  ):
    assert fact in words
  board = ranking.Leaderboard([ranking.Group({})], [])._replace(
    groups=[], remarks=[evil]
  )
  assert evil in "".join(check_self_contained(board.to_html([])).texts)


@pytest.mark.parametrize(
  ("benchmark", "shares"),
  [("passkey", "Share of exact answers"), ("needle", "Share of answers found")],
)
def test_maps_say_what_they_show_the_share_of(
  answer, record, benchmark, shares
):
  found = record([answer(depth=0.5)], benchmark=benchmark)
  assert f"{shares}, by length" in page.of_run(found, {"heatmap.png": b"png"})


def test_excerpts_take_turns_between_tasks_and_are_bounded(answer, record):
  answers = [
    answer(method, task=task, sample=sample, turn=1, prediction="x" * 999)
    for method in ("full", "keydiff")
    for task in ("a", "b")
    for sample in range(20)
  ]
  found = excerpts(record(answers))
  assert [excerpt.title for excerpt in found[:3]] == [
    "a, 1024 tokens, sample 0, turn 2",
    "b, 1024 tokens, sample 0, turn 2",
    "a, 1024 tokens, sample 1, turn 2",
  ]
  assert len(found) == 12
  assert found[0].question == "What is it? It is"
  assert found[0].replies[1] == ("keydiff", "25 %", "x" * 300 + " …", "100.0")
