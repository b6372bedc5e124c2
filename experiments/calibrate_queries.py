"""Measures a model's queries, for methods that read them.

  kvjax calibrate_queries --documents=DIR

reads the .txt and .md files of a folder, or contexts of LongBench (--data), in
chunks and writes a file with the means, covariances and lengths of the model's
queries and with its Q-Filters, which

  --methods=expected_attention:statistics=FILE,qfilters:filters=FILE

of every program read, and triattention:statistics=FILE. With the bundled model,
11,000 tokens take about half a minute on two cores. With --multihost, hosts
that run the same command share the model.
"""

from absl import flags

import kvjax
from kvjax.experiments import cli
from kvjax.experiments.finetuning import documents
from kvjax.experiments.inputs import document_inputs, host_inputs, run_inputs
from kvjax.experiments.report import wording
from kvjax.experiments.run import multihost, outputs
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.run.sentences import say

for module in (document_inputs, host_inputs):
  flags.adopt_module_key_flags(module)
for name in run_inputs.ALONE:
  flags.declare_key_flag(name)

_LENGTH = flags.DEFINE_integer(
  "length", 2048, "Maximum tokens of a chunk of a document.", lower_bound=16
)
_SAMPLES = flags.DEFINE_integer(
  "samples", 20, "Maximum number of chunks.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
  "output",
  "results/queries.safetensors",
  "The file to write, by a path without colons and commas, or its address.",
)
# Those of a text's first tokens are outliers.
_SINKS = 4


def main() -> None:
  """Measures and writes the file."""
  run_inputs.span_hosts("model")
  outputs.check_option(_OUTPUT.value)
  outputs.check_file(_OUTPUT.value)
  texts = document_inputs.read()
  cli.announce()
  with run_inputs.loaded() as (lm, _):
    run_inputs.check_part_length(lm, _LENGTH.value)
    parts = documents.chunks(texts, lm.text, _LENGTH.value, 1)
    multihost.check_same({"documents": documents.digest(parts)})
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

  def save() -> None:
    with outputs.written_file(_OUTPUT.value) as path:
      found.save(path)

  multihost.on_first(save)
  say(
    f"The statistics of {sum(map(len, chosen)):,} tokens in "
    f"{wording.count(len(chosen), 'chunk')} are in "
    f"{_OUTPUT.value}."
  )


if __name__ == "__main__":
  cli.run(main, sends=True, connect=host_inputs.start)
