"""The programs that benchmark a GPU or TPU, with their flags."""

import pathlib
from collections.abc import Iterator

# A step is named by its kind, or by KIND_LENGTH.
KINDS = ("check", "kernels", "decode", "batch", "sparse", "scoring")

# Tokens of an answer.
_DECODED = 64


def steps(
  rows: dict[int, int], sizes: str, folder: pathlib.Path
) -> Iterator[tuple[str, list[str]]]:
  """Yields names and commands.

  Args:
    rows: prompts per batch by length.
    sizes: the model's, as for --sizes.
    folder: where each program has a folder for its own files.
  """

  def step(name: str, program: str, *options: str) -> tuple[str, list[str]]:
    return name, [program, *options, f"--output={folder / name}"]

  def decode(
    name: str, length: int, batch: int, *options: str
  ) -> tuple[str, list[str]]:
    return step(
      name,
      "benchmark_decode",
      f"--sizes={sizes}",
      *options,
      f"--length={length - _DECODED}",
      f"--rows={batch}",
      f"--tokens={_DECODED}",
    )

  yield "check", ["device_check"]
  yield step("kernels", "benchmark_kernels")
  for length, batch in rows.items():
    methods = "--methods=keydiff,adakv,ctkvr.512"
    yield decode(f"decode_{length}", length, batch, methods)
  evicting = "--methods=keydiff,lagkv.kvpress,snapkv"
  yield decode("batch", 8192 + _DECODED, 32, evicting, "--budget=2048")
  lengths = ",".join(map(str, rows))
  yield step("sparse", "benchmark_sparse", f"--length={lengths}")
  # Two lengths at least, to see what grows.
  yield step(
    "scoring",
    "benchmark_scaling",
    f"--length={min(rows) // 2},{lengths}",
    "--methods=keydiff,lagkv:lag=128,compactor,snapkv,protokv",
  )
