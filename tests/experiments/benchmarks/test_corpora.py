"""SQuAD, HotpotQA, essays and word lists in each layout that users have."""

import json
import pathlib
import re

import datasets
import pytest

from kvjax.errors import InputError
from kvjax.experiments.benchmarks import essays
from kvjax.experiments.benchmarks.ruler import corpora, generator, word_lists
from kvjax.experiments.tasks import prose
from kvjax.experiments.tasks.question_answering import Question
from kvjax.experiments.tasks.words import ADJECTIVES, NOUNS

SQUAD = {
  "version": "v2.0",
  "data": [
    {
      "title": "Trees",
      "paragraphs": [
        {
          "context": "Oaks are old.",
          "qas": [
            {
              "id": "1",
              "question": "What is old?",
              "is_impossible": False,
              "answers": [
                {"text": "Oaks", "answer_start": 0},
                {"text": "Oaks are", "answer_start": 0},
              ],
            },
            {
              "id": "2",
              "question": "Who is old?",
              "is_impossible": True,
              "answers": [],
              "plausible_answers": [{"text": "Oaks", "answer_start": 0}],
            },
          ],
        },
        {
          "context": "Elms are tall.",
          "qas": [
            {
              "id": "3",
              "question": "Who is tall?",
              "is_impossible": True,
              "answers": [],
            }
          ],
        },
      ],
    },
    {
      "title": "Birds",
      "paragraphs": [
        {
          "context": "A wren sings.",
          "qas": [
            {
              "id": "4",
              "question": "What sings?",
              "is_impossible": False,
              "answers": [{"text": "A wren", "answer_start": 0}],
            }
          ],
        }
      ],
    },
  ],
}
SQUAD_ROWS = [
  {
    "id": question["id"],
    "title": article["title"],
    "context": paragraph["context"],
    "question": question["question"],
    "answers": {
      "text": [answer["text"] for answer in question["answers"]],
      "answer_start": [a["answer_start"] for a in question["answers"]],
    },
  }
  for article in SQUAD["data"]
  for paragraph in article["paragraphs"]
  for question in paragraph["qas"]
]
HOTPOTQA = [
  {
    "_id": "5",
    "question": "Is it?",
    "answer": "yes",
    "context": [["Oak", ["Oaks live.", " Long."]], ["Elm", ["Elms too."]]],
    "supporting_facts": [["Oak", 0]],
  },
  {
    "_id": "6",
    "question": "Which?",
    "answer": "Ash",
    "context": [["Elm", ["Elms too."]], ["Ash", ["Ash."]]],
    "supporting_facts": [["Ash", 0]],
  },
]
HOTPOTQA_ROWS = [
  entry
  | {
    "context": {
      "title": [title for title, _ in entry["context"]],
      "sentences": [sentences for _, sentences in entry["context"]],
    },
    "supporting_facts": {"title": [], "sent_id": []},
  }
  for entry in HOTPOTQA
]


def check_squad(corpus):
  assert corpus.documents == (
    "A wren sings.",
    "Elms are tall.",
    "Oaks are old.",
  )
  assert corpus.questions == (
    Question("What is old?", ("Oaks", "Oaks are"), (2,), (1,)),
    Question("What sings?", ("A wren",), (0,), ()),
  )


def check_hotpotqa(corpus):
  assert corpus.documents == (
    "Ash\nAsh.",
    "Elm\nElms too.",
    "Oak\nOaks live. Long.",
  )
  assert corpus.questions == (
    Question("Is it?", ("yes",), (2, 1)),
    Question("Which?", ("Ash",), (1, 0)),
  )


CORPORA = {
  "squad": (corpora.squad, SQUAD, SQUAD_ROWS, check_squad),
  "hotpotqa": (corpora.hotpotqa, HOTPOTQA, HOTPOTQA_ROWS, check_hotpotqa),
}


@pytest.mark.parametrize("name", CORPORA)
def test_the_original_file_and_the_rows_of_the_hub_are_the_same(name, tmp_path):
  read, original, rows, check = CORPORA[name]
  (tmp_path / "dev.json").write_text(json.dumps(original))
  check(read(tmp_path / "dev.json"))
  lines = tmp_path / "rows.jsonl"
  lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
  check(read(lines))
  table = datasets.Dataset.from_list(rows)
  other = datasets.Dataset.from_list(rows[:1])
  saved = datasets.DatasetDict(train=other, validation=table)
  saved.save_to_disk(str(tmp_path / "saved"))
  check(read(tmp_path / "saved"))
  hub = tmp_path / "hub"
  for folder in ("distractor", "fullwiki"):
    (hub / folder).mkdir(parents=True)
  table.to_parquet(str(hub / "distractor/validation-00000-of-00001.parquet"))
  other.to_parquet(str(hub / "distractor/train-00000-of-00001.parquet"))
  other.to_parquet(str(hub / "fullwiki/validation-00000-of-00001.parquet"))
  check(read(hub))


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize(
  ("file", "text", "wrong"),
  [
    ("dev.json", "{", r"dev\.json is not valid JSON.*line 1"),
    ("dev.json", '{"data": [{}]}', r"dev\.json is not as in"),
    ("dev.json", '[{"question": "?"}]', r"dev\.json is not as in"),
    ("dev.json", "[]", "not as in SQuAD|holds no question"),
    ("rows.jsonl", '{"question": "?"}', r"(?i)line 1 of \S+rows\.jsonl needs"),
    ("rows.txt", "?", r"rows\.txt holds no questions"),
    ("none.json", None, r"none\.json cannot be read: No such file"),
  ],
)
def test_other_files_are_refused_by_name(name, file, text, wrong, tmp_path):
  read, *_ = CORPORA[name]
  if text is not None:
    (tmp_path / file).write_text(text)
  with pytest.raises(InputError, match=wrong):
    read(tmp_path / file)


def test_the_damaged_paragraph_or_entry_is_named(tmp_path):
  path = tmp_path / "dev.json"
  article = {"title": "Fish", "paragraphs": [{"context": "Eels."}]}
  path.write_text(json.dumps({"data": [*SQUAD["data"], article]}))
  with pytest.raises(InputError, match=r"Paragraph 1 of article 3 of .*'qas'"):
    corpora.squad(path)
  path.write_text(json.dumps([*HOTPOTQA, {"question": "?"}]))
  with pytest.raises(InputError, match=r"Entry 3 of .*'context'"):
    corpora.hotpotqa(path)


TEXT = "Call me Ishmael.  Some years\nago I went to sea. " * 30
SENTENCES = ("Call me Ishmael.", "Some years ago I went to sea.") * 30


def test_essays_come_from_a_text_a_json_or_a_folder(tmp_path):
  (tmp_path / "moby.md").write_text(TEXT)
  assert essays.read(tmp_path / "moby.md") == SENTENCES
  (tmp_path / "essays.json").write_text(json.dumps({"text": TEXT}))
  assert essays.read(tmp_path / "essays.json") == SENTENCES
  folder = tmp_path / "essays"
  folder.mkdir()
  (folder / "b.txt").write_text("Then he said more.")
  (folder / "a.txt").write_text(TEXT)
  (folder / "notes.md").write_text("No essay.")
  assert essays.read(folder) == (*SENTENCES, "Then he said more.")
  assert " ".join(SENTENCES) == " ".join(TEXT.split())
  assert prose.split_sentences(" ".join(SENTENCES)) == list(SENTENCES)


def test_what_is_no_essay_is_refused(tmp_path):
  (tmp_path / "short.txt").write_text("One sentence only.")
  with pytest.raises(InputError, match=r"needs 40 sentences .* and has 1"):
    essays.read(tmp_path / "short.txt")
  (tmp_path / "list.json").write_text('{"texts": []}')
  with pytest.raises(InputError, match='a text under "text"'):
    essays.read(tmp_path / "list.json")
  with pytest.raises(InputError, match="cannot be read: No such file"):
    essays.read(tmp_path / "none.txt")
  (tmp_path / "empty").mkdir()
  with pytest.raises(InputError, match=r"holds no \.txt file"):
    essays.read(tmp_path / "empty")


def test_words_come_from_lines_a_json_or_the_package(tmp_path):
  named = [f"word{number}" for number in range(50)]
  lines = tmp_path / "words.txt"
  lines.write_text("\n".join([*named, "", " word1 "]))
  assert word_lists.read(str(lines)) == tuple(sorted(named))
  values = tmp_path / "english_words.json"
  values.write_text(json.dumps(dict(enumerate(named))))
  assert word_lists.read(str(values)) == tuple(sorted(named))
  lines.write_text("one\ntwo\n")
  with pytest.raises(
    InputError, match="needs 40 words, one per line, and has 2"
  ):
    word_lists.read(str(lines))
  # As many as RULER draws from.
  assert len(word_lists.read("wonderwords")) == 8166


def test_keys_of_needles_come_from_rulers_adjectives_and_nouns():
  """All of wonderwords, where two of 912 adjectives occur twice."""
  adjectives, nouns = word_lists.key_words()
  assert (len(adjectives), len(nouns)) == (910, 6782)
  assert {*adjectives, *nouns} <= {*word_lists.read("wonderwords")}
  texts = generator.Texts.read(words="wonderwords")
  choice = generator.choose(["niah_single_1", "niah_multikey_2"], texts)
  assert choice.data["keys"].startswith("wonderwords (sha256 ")
  drawn = generator.samples(
    choice.tasks, [900], 6, 0, lambda text: len(text.split()), texts
  )
  told = [s.context for samples in drawn.values() for s in samples]
  keys = re.findall(r"numbers for (.+?) is: \d{7}", "\n".join(told))
  assert len(keys) > 100
  firsts, seconds = set(adjectives), set(nouns)
  built_in = {*ADJECTIVES, *NOUNS}
  for key in keys:
    assert any(
      key[:at] in firsts and key[at + 1 :] in seconds
      for at in range(len(key))
      if key[at] == "-"
    )
  assert not all({*key.split("-")} <= built_in for key in keys)
  assert "keys" not in generator.choose(["niah_multikey_3", "cwe"], texts).data
  assert "keys" not in generator.Texts.read().origins


def test_the_chapters_of_training_are_named(tmp_path, monkeypatch):
  """A file or folder of that name takes precedence."""
  named = pathlib.Path(essays.TRAINING)
  texts = generator.Texts.read(named)
  assert texts.essay == "train"
  assert texts.origins["essay"] == f"{prose.SOURCE}, chapters of training"
  monkeypatch.chdir(tmp_path)
  named.write_text("Oaks are old. " * 50)
  assert generator.Texts.read(named).essay == ("Oaks are old.",) * 50
