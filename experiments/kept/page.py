"""HTML pages of a text with tokens shaded by the heads that keep them."""

import dataclasses
import itertools
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import markupsafe
import numpy as np
from jaxtyping import Int

import kvjax
from kvjax.experiments.kept import passages
from kvjax.experiments.kept.counts import Kept, kept
from kvjax.experiments.report import page, wording
from kvjax.experiments.run import environment
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC, QUERY_AWARE
from kvjax.models.pretrained import Pretrained

_INVISIBLE = ("Cc", "Cf")
_REST_OF_CHARACTER = "⋯"


@dataclasses.dataclass(frozen=True)
class Page:
  """A self-contained page.

  Attributes:
    html: the content of the file.
    shares: what each method keeps of the passage; empty without one.
  """

  html: str = dataclasses.field(repr=False)
  shares: tuple[passages.Share, ...] = ()

  def _repr_html_(self) -> str:
    """Returns the page in a frame, for notebooks."""
    return (
      f'<iframe srcdoc="{markupsafe.escape(self.html)}" '
      'style="width: 100%; height: 40rem; border: 0"></iframe>'
    )


def of_text(
  lm: Pretrained,
  chosen: Sequence[Candidate],
  text: str,
  question: str | None = None,
  about: Mapping[str, str] | None = None,
  passage: str | None = None,
) -> Page:
  """Renders the page of a text and the tokens that candidates keep.

  Args:
    lm: the model.
    chosen: methods at budgets, side by side.
    text: the text, which gets the model's chat template.
    question: prefilled after the text, so that methods know it.
    about: more facts about model and text.
    passage: a part of the text, such as a needle; the page marks it, and says
      how much of it each method keeps.

  Raises:
    InputError: see `counts.kept`, or the text does not contain the passage.
  """
  before, after = lm.text.split_chat(text)
  parts = [before] if question is None else [before, question + after]
  tokens = [token for part in parts for token in lm.text.encode(part)]
  pieces = [lm.text.pieces(part) for part in parts]
  nothing = np.zeros(0, np.int64)
  marked = nothing if passage is None else passages.find(pieces[0], passage)
  request = kvjax.RepeatRequest.of(lm.text)
  results = kept(lm.model, lm.params, tokens, chosen, request)
  geometry = lm.model.geometry
  shares = [
    passages.share(one, marked, geometry) for one in results if marked.size
  ]
  layers, heads = geometry.num_layers, geometry.layers[0].kv_heads
  facts = dict(about or {}) | {
    "Tokens": f"{len(tokens):,}",
    "Heads": f"{layers} layers of {heads} KV heads",
    "Protocol": (
      f"{QUERY_AGNOSTIC}: nothing is asked before the text is compressed"
      if question is None
      else f"{QUERY_AWARE}: the question is prefilled with the text"
    ),
    "Device": environment.device(),
    "Versions": wording.versions(environment.versions()),
  }
  return Page(
    page.render(
      "kept",
      title="What the heads keep",
      facts=facts,
      parts=[list(map(shown, part)) for part in pieces],
      views=[
        _view(one, heads, str(share or ""))
        for one, share in itertools.zip_longest(results, shares)
      ],
      layers=layers,
      heads=heads,
      marked=marked.tolist(),
    ),
    tuple(shares),
  )


def shown(piece: str) -> markupsafe.Markup:
  """Formats a token's text, with signs for invisible characters."""
  if not piece:
    return _sign(_REST_OF_CHARACTER)
  return markupsafe.Markup("").join(map(_shown_character, piece))


def _shown_character(character: str) -> markupsafe.Markup:
  if character == "\n":
    return _sign("↵") + character
  if character != "\t" and unicodedata.category(character) in _INVISIBLE:
    return _sign(f"U+{ord(character):04X}")
  return markupsafe.escape(character)


def _sign(text: str) -> markupsafe.Markup:
  return markupsafe.Markup("<i>{}</i>").format(text)


def _view(result: Kept, heads: int, passage: str) -> dict[str, Any]:
  """Describes the column of a candidate, for the template.

  Args:
    result: what the candidate keeps.
    heads: KV heads of a layer.
    passage: what it keeps of the passage, in words; "" without one.
  """
  candidate = result.candidate
  layers, length = result.heads.shape
  mean = result.heads.sum() / (layers * heads)
  when = " for the last token" if result.reads else ""
  unit, size = wording.unit([result.full_bytes])
  budget = wording.budget(candidate.method, candidate.budget)
  return {
    "name": f"{candidate.method}, {budget}",
    "options": candidate.options,
    "done": "read" if result.reads else "kept",
    "counts": _hexadecimal(result.heads),
    "mean": f"{mean:,.1f} of {length:,} ({wording.share(mean / length)}){when}",
    "size": (
      f"{result.cache_bytes / size:,.1f} of {result.full_bytes / size:,.1f} "
      f"{unit} ({wording.share(result.cache_bytes / result.full_bytes)})"
    ),
    "passage": passage,
  }


def _hexadecimal(heads: Int[np.ndarray, "L n"]) -> list[str]:
  """Encodes each token as two digits per layer."""
  return [column.tobytes().hex() for column in heads.T.astype(np.uint8)]
