"""Measures the queries of a model, for methods that read them.

  kvjax calibrate_queries --documents=DIR

reads the .txt and .md files of a folder in chunks and writes a file with the
means, covariances and lengths of the model's queries and with its Q-Filters,
which

  --methods=expected_attention:statistics=FILE,qfilters:filters=FILE

of every program read, and triattention:statistics=FILE. With the bundled model,
11,000 tokens take about half a minute on two cores.
"""

import pathlib

from absl import flags

import kvjax
from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.finetuning import documents
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.report import wording
from kvjax.experiments.run import results
from kvjax.experiments.run.progress_bar import progress_bar

flags.adopt_module_key_flags(run_inputs)

_DOCUMENTS = flags.DEFINE_string(
  "documents", None, "Folder of .txt and .md files to read."
)
_LENGTH = flags.DEFINE_integer(
  "length", 2048, "Maximum tokens of a chunk of a document.", lower_bound=16
)
_SAMPLES = flags.DEFINE_integer(
  "samples", 20, "Maximum number of chunks.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
  "output",
  "results/queries.safetensors",
  "The file to write, whose name has neither colons nor commas.",
)
# Those of a text's first tokens are outliers.
_SINKS = 4


def main() -> None:
  """Measures and writes the file."""
  if _DOCUMENTS.value is None:
    raise InputError(
      "Name a folder of .txt and .md files to read: --documents=DIR."
    )
  output = pathlib.Path(_OUTPUT.value)
  if {":", ","} & {*str(output)}:
    raise InputError(
      f"--output={output} cannot be named as an option of a method; give a "
      "file without colons and commas."
    )
  results.check_writable(output.absolute().parent)
  texts = documents.read(pathlib.Path(_DOCUMENTS.value))
  with run_inputs.loaded() as (lm, _):
    limit = lm.config.geometry.max_positions
    if _LENGTH.value > limit:
      raise InputError(
        f"--length={_LENGTH.value} is longer than the context of this model, "
        f"{limit} tokens."
      )
    parts = documents.chunks(texts, lm.text, _LENGTH.value, 1)
    rows = [
      row[:count].tolist()
      for row, count in zip(parts.tokens, parts.lengths, strict=True)
    ]
    # The longest, as short ones say little.
    chosen = sorted(rows, key=len, reverse=True)[: _SAMPLES.value]
    with progress_bar(len(chosen)) as advance:
      found = kvjax.calibrate_queries(
        lm.model,
        lm.params,
        chosen,
        sinks=_SINKS,
        on_text=lambda: advance("measuring", 1),
      )
  output.parent.mkdir(parents=True, exist_ok=True)
  found.save(output)
  print(
    f"The statistics of {sum(map(len, chosen)):,} tokens in "
    f"{wording.count(len(chosen), 'chunk')} are in {output}."
  )


if __name__ == "__main__":
  cli.run(main)
