"""The experiments of Compactor (Chari and Van Durme, arXiv 2507.08143 v1)."""

from kvjax.experiments.papers import compactor_programs as programs
from kvjax.experiments.papers.analyses import latency, unmasked_attention
from kvjax.experiments.papers.compactor_setups import E3_1, E3_2, E3_3, E3_4
from kvjax.experiments.papers.data_model import Analysis, Experiment
from kvjax.experiments.papers.shared import (
  CODE_SCORES,
  ON_NEEDLES,
  at_random,
  prose,
  ruler,
)

_PAPER = "Compactor"
_LLAMA = "Llama-3.1-8B"
_MODELS = "Llama-3.1-8B-Instruct, Qwen2.5-14B-Instruct-1M"

EXPERIMENTS = (
  Experiment(
    "E3.1",
    _PAPER,
    "RULER at 4K tokens, five methods and two ports",
    _MODELS,
    "SQuAD and HotpotQA for QA",
    "eight needle tasks of 1,024 tokens",
    6,
    (E3_1,),
    remarks=(
      "The text calls 93.8, 87.6 and 59.5 a percentage of the baseline, the "
      "table calls them scores, with lambda .35 and 87.4.",
    ),
  ),
  Experiment(
    "E3.2",
    _PAPER,
    "needles against questions at 50 %",
    _MODELS,
    "SQuAD and HotpotQA",
    "eight needle tasks of 1,024 tokens, no questions",
    3,
    (E3_2,),
  ),
  Experiment(
    "E3.3",
    _PAPER,
    "LongBench without code (14 sets) and code",
    _MODELS,
    "LongBench",
    ON_NEEDLES,
    4,
    (E3_3,),
    remarks=(
      "The single- and multi-document rows of SnapKV and PyramidKV on Llama "
      "are printed identical and are no targets; they are not listed. Their "
      "other categories, PyramidKV's code and all code on Qwen are not known "
      "here.",
      "Compactor's categories on Qwen at 50 % come to 48.8, where its mean is "
      "printed as 48.5.",
      CODE_SCORES,
    ),
  ),
  Experiment(
    "E3.4",
    _PAPER,
    "ablations: leverage, its solver and sketch, lambda",
    _LLAMA,
    "SQuAD and HotpotQA for QA",
    "eight needle tasks of 1,024 tokens",
    6,
    (E3_4,),
    remarks=(
      "The rows of other lambdas are known here for 50 and 10 % alone.",
    ),
  ),
  Experiment(
    "E3.5",
    _PAPER,
    "how likely answers stay, by retention, per RULER task",
    _MODELS,
    "SQuAD and HotpotQA for QA",
    "seven needle tasks of 1,024 tokens",
    5,
    (programs.CURVES,),
    ("The task of UUIDs lies on the diagonal.",),
  ),
  Experiment(
    "E3.6",
    _PAPER,
    "calibrated retention: fitted on RULER, used per document",
    _MODELS,
    "LongBench",
    "fitted to seven needle tasks, used on four in generated reports",
    10,
    programs.ZERO_SHOT,
    (
      "On LongBench at tau .95 Llama keeps 38 % with Compactor, 72 % with "
      "SnapKV, 75 % with PyramidKV and 90 % at random, as good as the full "
      "cache (ANOVA p = .53, 20 trials); the order is what counts.",
    ),
    (
      "tau is .95, and .90 for Qwen, unless --tau is given. --trials repeats "
      "LongBench with 20 sketches and tests the difference by ANOVA.",
    ),
  ),
  Experiment(
    "E3.7",
    _PAPER,
    "the same after LoRA finetuning on the documents",
    _MODELS,
    "LongBench",
    "the same after LoRA on other reports of that kind",
    15,
    programs.FINETUNED,
    (
      "After finetuning (rank 128 on Q, K and V, 8 epochs) Compactor keeps "
      "22 %, SnapKV 44 %, PyramidKV 51 % and Random 76 %.",
    ),
    (
      "E3.6 is the same before. Without --data, curves are fitted to text that "
      "the model knows: before to prose of the bundled model's training, after "
      "to the reports that it has learnt, or to the documents of --essay.",
    ),
  ),
  Experiment(
    "E3.8",
    _PAPER,
    "latency of scorers in one layer of Llama-3.1-8B",
    _LLAMA,
    "",
    "random activations of 1,024 to 4,096 tokens on this device",
    4,
    (
      Analysis(
        "latency",
        latency.scorers,
        at_random(10_000, 100_000, 1_000_000),
        at_random(1024, 2048, 4096),
        model=False,
      ),
    ),
    ("Above 16K tokens Compactor takes about as long as SnapKV.",),
  ),
  Experiment(
    "E3.9",
    _PAPER,
    "why: attention without the causal mask has stripes",
    _MODELS,
    "",
    "one prompt of 512 tokens",
    1,
    (
      Analysis(
        "attention",
        unmasked_attention.measure,
        ruler((4096,), 1, ("niah_single_2",)),
        prose(512, 1),
      ),
    ),
    (
      "Without the mask, separators, conjunctions and the beginning get much "
      "from everywhere, next to a band along the diagonal; the mask hides it.",
    ),
    (
      "Inferred: these are Figures 2 and 8 of the first version. A summary of "
      "the second calls them 1 and 7, and what they show is taken from it; "
      "model, layers, heads and text of the pictures are not known here.",
    ),
  ),
)
