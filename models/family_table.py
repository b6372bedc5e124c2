"""The table of docs/models.md: families, what they have, and who reads them.

    python -m kvjax.models.family_table

writes it into the page, from the root of the repository.
"""

import pathlib

from kvjax import files
from kvjax.models.adapters import ADAPTERS
from kvjax.models.families import FAMILIES, Family
from kvjax.models.gguf.metadata import MODEL_TYPES

PAGE = pathlib.Path("docs", "models.md")
_HEAD = (
  "`model_type`",
  "models",
  "layers with a window",
  "RoPE",
  "what else is special",
  "GGUF",
  "adapters",
)
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
_WINDOWS = {
  "never": "",
  "all": "all, if there is one",
  "enabled": "all, if enabled",
  "late": "the upper ones, if enabled",
}
_ROPES = {
  "same": "",
  "local": "another one in layers with a window",
  "unscaled": "scaled in layers without a window only",
  "windowed": "in layers with a window only",
}


def family_table() -> str:
  """Formats the table, in Markdown, from what the code reads."""
  rows = [_HEAD, (":--",) * len(_HEAD)]
  for model_type, family in FAMILIES.items():
    adapters = [
      f"`{adapter.function.__name__}`"
      for adapter in ADAPTERS.values()
      if model_type in adapter.families
    ]
    rows.append(
      (
        f"`{model_type}`",
        family.models,
        _windows(family),
        _rope(family),
        ", ".join(_features(family)),
        "✓" if model_type in MODEL_TYPES.values() else "",
        ", ".join(adapters),
      )
    )
  # An empty cell is one space.
  lines = (
    "|".join(f" {cell} " if cell else " " for cell in row) for row in rows
  )
  return "".join(f"|{line}|\n" for line in lines)


def replace_table(page: str) -> str:
  """Returns a page with the table as it is now.

  Args:
    page: text of the page, with one table whose first column is `model_type`.
  """
  start = page.index(f"| {_HEAD[0]} |")
  end = page.index("\n\n", start) + 1
  return page[:start] + family_table() + page[end:]


def _windows(family: Family) -> str:
  if not isinstance(family.windows, int):
    if family.windows == "enabled" and family.rope == "listed":
      return "those without RoPE, if enabled"
    return _WINDOWS[family.windows]
  if family.windows == 2:
    return "every other one"
  return f"{_NUMBERS[family.windows - 1]} of {_NUMBERS[family.windows]}"


def _rope(family: Family) -> str:
  if family.rope == "listed":
    period = family.absent["no_rope_layer_interval"]
    return f"not in one layer of {_NUMBERS[period]}"
  parts = [_ROPES[family.rope]] if _ROPES[family.rope] else []
  if family.partial:
    parts.append("of a part of each head")
  if family.interleaved:
    parts.append("of neighboring channels")
  return ", ".join(parts)


def _features(family: Family) -> list[str]:
  """What layers and weights have that those of Llama do not."""
  style, norms = family.style, family.style.norms
  named = {
    "biases": family.attention_bias in ("qkv", "always"),
    "sinks": style.sinks,
    "experts": "num_experts_per_tok" in family.absent,
    "weights in MXFP4": style.gate == "clipped",
    "norms of queries and keys": style.qk_norm is not None,
    "norms before and after the branches": norms.before_attention
    and norms.after_attention,
    "norms after the branches": norms.before_attention is None,
    "layer norms": style.norm.centered,
    "parallel branches": style.parallel,
    "constant factors": bool(family.multipliers),
  }
  return [name for name, has_it in named.items() if has_it]


if __name__ == "__main__":
  text = PAGE.read_text(encoding="utf-8")
  files.write_text(PAGE, replace_table(text))
