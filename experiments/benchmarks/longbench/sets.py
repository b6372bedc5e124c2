"""The datasets of LongBench (Bai et al., 2024) and LongBench-E."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Category = Literal[
  "single-document",
  "multi-document",
  "summaries",
  "few-shot",
  "synthetic",
  "code",
]
Language = Literal["English", "Chinese"]


class DataSet(NamedTuple):
  """A dataset and its settings.

  Attributes:
    category: category in the official table.
    language: language; code counts as English here and is in both averages.
    metric: one of `kvjax.experiments.metrics`.
    max_new_tokens: maximum tokens of an answer.
    examples: whether it is few-shot and has no chat template.
    first_line: whether the answer is the prediction's first line.
  """

  category: Category
  language: Language
  metric: str
  max_new_tokens: int
  examples: bool = False
  first_line: bool = False


SETS: Mapping[str, DataSet] = {
  "narrativeqa": DataSet("single-document", "English", "qa_f1", 128),
  "qasper": DataSet("single-document", "English", "qa_f1", 128),
  "multifieldqa_en": DataSet("single-document", "English", "qa_f1", 64),
  "multifieldqa_zh": DataSet("single-document", "Chinese", "qa_f1_zh", 64),
  "hotpotqa": DataSet("multi-document", "English", "qa_f1", 32),
  "2wikimqa": DataSet("multi-document", "English", "qa_f1", 32),
  "musique": DataSet("multi-document", "English", "qa_f1", 32),
  "dureader": DataSet("multi-document", "Chinese", "rouge_zh", 128),
  "gov_report": DataSet("summaries", "English", "rouge", 512),
  "qmsum": DataSet("summaries", "English", "rouge", 512),
  "multi_news": DataSet("summaries", "English", "rouge", 512),
  "vcsum": DataSet("summaries", "Chinese", "rouge_zh", 512),
  "trec": DataSet("few-shot", "English", "classification", 64, True, True),
  "triviaqa": DataSet("few-shot", "English", "qa_f1", 32, True, True),
  "samsum": DataSet("few-shot", "English", "rouge", 128, True, True),
  "lsht": DataSet("few-shot", "Chinese", "classification", 64, True, True),
  "passage_count": DataSet("synthetic", "English", "count", 32),
  "passage_retrieval_en": DataSet("synthetic", "English", "retrieval", 32),
  "passage_retrieval_zh": DataSet("synthetic", "Chinese", "retrieval_zh", 32),
  "lcc": DataSet("code", "English", "code_sim", 64, True),
  "repobench-p": DataSet("code", "English", "code_sim", 64, True),
}

LONGBENCH_E = (
  *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report"),
  *("multi_news", "trec", "triviaqa", "samsum", "passage_count"),
  *("passage_retrieval_en", "lcc", "repobench-p"),
)
NAMES = (*SETS, *(f"{name}_e" for name in LONGBENCH_E))

# LongBench-E is reported by the length of a row in words: below 4000, below
# 8000, and the rest.
BUCKETS = ("0-4k", "4-8k", "8k+")
