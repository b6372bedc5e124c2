"""Which tokens heads keep or read: the counts, the page, the binary."""

import collections
import html
import html.parser
import pathlib

import numpy as np
import pytest
from made_up_gates import write_kvzap

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.kept import counts, page, passages, pictures
from kvjax.experiments.run.candidates import candidates
from kvjax.testing import kept_positions

# 3 bytes a character, markup, what cannot be seen, and a break.
TEXT = (
  'Naïve 日本 <b>&amp;</b> "x" </script>\u202e\n\tAnn called at 1234567. '
  "Then nobody called, and nobody came.\n"
)
HEADS, LAYERS = 2, 2
ROOT = pathlib.Path(__file__).parents[2]


def _tokens(tiny):
  return tiny.tokenizer.encode(tiny.tokenizer.split_chat(TEXT)[0])


def _kept(tiny, names, budget, kv_dtype=None):
  chosen = candidates(names, [budget], kv_dtype=kv_dtype)[1:]
  return counts.kept(tiny.model, tiny.params, _tokens(tiny), chosen)


def _caches(tiny, found):
  """The caches of what is found, by the program that has found it."""
  tokens = _tokens(tiny)
  prompts = kvjax.Prompts.of([tokens], len(tokens))
  whole = kvjax.get_plan("full", kvjax.Retention(1.0))
  plans = [whole, *(one.candidate.plan for one in found)]
  return kvjax.sweep(tiny.model, tiny.params, prompts, plans)[0]


@pytest.mark.slow
def test_counts_are_those_of_the_positions_that_heads_hold(tiny):
  names = ["h2o", "ada/snapkv:window=4", "pyramid/keydiff"]
  found = _kept(tiny, names, kvjax.Tokens(20), "int8")
  full, *caches = _caches(tiny, found)
  length = len(_tokens(tiny))
  for one, cache in zip(found, caches, strict=True):
    for layer, valid in zip(one.heads, kept_positions(cache, 0), strict=True):
      each = collections.Counter(np.concatenate(valid).tolist())
      assert layer.tolist() == [each[place] for place in range(length)]
    assert (one.cache_bytes, one.full_bytes) == (cache.nbytes, full.nbytes)
  assert found[1].heads.sum() == found[0].heads.sum() == LAYERS * HEADS * 20
  assert len(set(found[2].heads.sum(axis=1).tolist())) == LAYERS


def test_heads_may_keep_nothing(tiny, tmp_path):
  gate = write_kvzap(tmp_path / "gate", 32, 2, 2)
  (found,) = _kept(tiny, [f"kvzap:gate={gate}"], kvjax.Tokens(1))
  (_, cache) = _caches(tiny, [found])
  heads = [head for layer in kept_positions(cache, 0) for head in layer]
  assert min(map(len, heads)) == 0
  assert found.heads.sum() == sum(map(len, heads)) > 0


@pytest.fixture(scope="module")
def kept(tiny):
  """Of several methods, by one program."""
  few, most = kvjax.Tokens(12), kvjax.Tokens(len(_tokens(tiny)) - 8)
  names = [
    "streaming:sinks=3",
    "magicpig:sinks=2:local=5:bits=3:tables=12",
    "flat:sinks=2:local=5",
  ]
  chosen = [*candidates(names, [few])[1:], candidates(names[2:], [most])[1]]
  return counts.kept(tiny.model, tiny.params, _tokens(tiny), chosen)


@pytest.mark.slow
def test_streaming_keeps_the_first_and_the_last(tiny, kept):
  found = kept[0]
  length = len(_tokens(tiny))
  expected = [HEADS] * 3 + [0] * (length - 12) + [HEADS] * 9
  assert found.heads.tolist() == [expected] * LAYERS


@pytest.mark.slow
def test_retrieval_methods_show_what_the_last_token_reads(tiny, kept):
  _, _, *caches, _ = _caches(tiny, kept)
  found = kept[1:3]
  for one, cache in zip(found, caches, strict=True):
    reads = np.asarray(cache.num_attended).sum(axis=(1, 2))
    assert one.heads.sum(axis=1).tolist() == reads.tolist()
    assert (one.heads[:, [0, 1, -5, -1]] == HEADS).all()
    assert reads[-1] < one.heads.shape[1] * HEADS
  assert len({one.heads[-1].sum() for one in found}) == 2


@pytest.mark.slow
def test_all_but_one_token_is_read(tiny, kept):
  # 2 sinks and 5 last tokens are read beside what is retrieved.
  length, found = len(_tokens(tiny)), kept[3]
  assert found.heads.max() == HEADS
  assert found.heads.sum(axis=1).tolist() == [HEADS * (length - 1)] * LAYERS


@pytest.mark.slow
def test_reads_are_counted_for_models_with_another_scale(scaled):
  """Squeezed Attention reads others if queries are larger."""
  name = "squeezed:local=5:cluster_tokens=4:window=10"
  chosen = candidates([name], [kvjax.Tokens(12)])[1:]
  found = counts.kept(scaled.model, scaled.params, _tokens(scaled), chosen)
  _, cache = _caches(scaled, found)
  reads = np.asarray(cache.num_attended).sum(axis=(1, 2))
  assert found[0].heads.sum(axis=1).tolist() == reads.tolist()


class _Reader(html.parser.HTMLParser):
  """The tokens of each view: their text without signs, and their counts."""

  def __init__(self):
    super().__init__()
    self.views = []
    self._open = []

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    assert not {"src", "href"} & attrs.keys()
    if tag == "section":
      self.views.append([])
    if tag == "span" and "data-heads" in attrs:
      self.views[-1].append(["", list(bytes.fromhex(attrs["data-heads"]))])
    self._open.append(tag)

  def handle_endtag(self, tag):
    while self._open.pop() != tag:
      pass

  def handle_data(self, data):
    if self._open[-1:] == ["span"] and self.views:
      self.views[-1][-1][0] += data


def test_the_page_holds_the_text_and_the_counts(tiny):
  chosen = candidates(["h2o", "flat"], [kvjax.Retention(0.25)])[1:]
  shown = page.of_text(tiny, chosen, TEXT, "Who called?", {"Model": "<tiny>"})
  reader = _Reader()
  reader.feed(shown.html)
  before, after = tiny.tokenizer.split_chat(TEXT)
  parts = [before, "Who called?" + after]
  tokens = [token for part in parts for token in tiny.tokenizer.encode(part)]
  found = counts.kept(tiny.model, tiny.params, tokens, chosen)
  assert len(reader.views) == 2
  for view, one in zip(reader.views, found, strict=True):
    text = "".join(piece for piece, _ in view)
    assert text == "".join(parts).replace("\u202e", "")
    assert [own for _, own in view] == one.heads.T.tolist()
  for words in (
    f"{len(tokens)}</dd>",
    "query-aware",
    "&lt;tiny&gt;",
    "h2o, 25 %",
    "Read per head",
    "for the last token",
    "KiB (25",
  ):
    assert words in shown.html, words
  frame = shown._repr_html_()
  assert html.unescape(frame.split('"')[1]) == shown.html


def test_the_page_says_how_much_of_a_passage_each_method_keeps(tiny):
  names, passage = ["streaming:sinks=3", "random"], "1234567"
  chosen = candidates(names, [kvjax.Tokens(24)])[1:]
  shown = page.of_text(tiny, chosen, TEXT, passage=passage)
  found = counts.kept(tiny.model, tiny.params, _tokens(tiny), chosen)
  pieces = tiny.tokenizer.pieces(tiny.tokenizer.split_chat(TEXT)[0])
  ends = np.cumsum([len(piece) for piece in pieces])
  start = "".join(pieces).index(passage)
  inside = [p for p, end in enumerate(ends) if start < end < start + 8]
  for one, share in zip(found, shown.shares, strict=True):
    layers = [sum(layer[p] for p in inside) / HEADS for layer in one.heads]
    assert share.mean == pytest.approx(sum(layers) / LAYERS)
    assert (share.least, share.layer) == (min(layers), np.argmin(layers))
    assert share.tokens == len(inside)
    assert f"per head</dt><dd>{share}" in shown.html
  assert shown.shares[0] != shown.shares[1]
  assert shown.html.count('class="passage"') == 2 * len(inside)


def test_layers_with_windows_count_nothing_of_a_passage():
  whole, local = (
    kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=8, window=window)
    for window in (None, 16)
  )
  empty = kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=8, cache=False)
  geometry = kvjax.Geometry((local, empty, whole, whole), 64)
  chosen = candidates(["keydiff"], [kvjax.Tokens(2)])[1]
  heads = np.array([[0, 0, 0], [2, 2, 0], [1, 0, 2]])
  share = passages.share(
    counts.Kept(chosen, heads, 1, 2), np.array([0, 1]), geometry
  )
  assert share == passages.Share(mean=1.25, tokens=2, least=0.5, layer=3)


@pytest.mark.parametrize("passage", ["", "7654321"])
def test_a_passage_must_be_in_the_text(passage):
  with pytest.raises(InputError, match="does not contain the passage"):
    passages.find(["It is 42."], passage)


def test_a_token_counts_that_holds_a_part_of_a_passage():
  assert passages.find(["It is", " 4", "2."], "42").tolist() == [1, 2]


@pytest.mark.parametrize(
  ("piece", "expected"),
  [
    ("", "<i>⋯</i>"),
    ("a\n", "a<i>↵</i>\n"),
    ("\t <", "\t &lt;"),
    ("\u200bx\r", "<i>U+200B</i>x<i>U+000D</i>"),
  ],
)
def test_what_cannot_be_seen_has_a_sign(piece, expected):
  assert page.shown(piece) == expected


def test_the_binary_writes_a_page_and_nothing_else(
  run_binary, tiny_directory, tmp_path
):
  (tmp_path / "notes.txt").write_text(TEXT, encoding="utf-8")
  output = tmp_path / "new" / "kept.html"
  result = run_binary(
    "kvjax.experiments.show_kept",
    f"--model={tiny_directory}",
    f"--text={tmp_path}/notes.txt",
    "--methods=key_norm,streaming",
    "--budget=16",
    "--passage=Ann called",
    f"--output={output}",
  )
  assert result.returncode == 0, result.stderr
  assert "streaming at 16 tokens keeps, of 'Ann called' and" in result.stdout
  assert "shows key_norm at 16 tokens, streaming at 16 tokens." in result.stdout
  written = output.read_text(encoding="utf-8")
  assert "tiny, float32" in written
  assert "query-agnostic" in written
  assert [path.name for path in output.parent.iterdir()] == ["kept.html"]


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--methods=keydif"], "no method 'keydif' (did you mean keydiff"),
    (["--methods=full"], "Nothing is left out; give a method and less"),
    (["--retention=1"], "Nothing is left out; give a method and less"),
    (["--methods=streaming:rerotate=true"], "renumbers what it keeps"),
    (["--text=none.txt"], "none.txt cannot be read: No such file"),
    ([], "tokens; this model's context is 512:"),
    (["--output=."], ". cannot be written: Is a directory."),
  ],
  ids=str,
)
def test_what_is_wrong_is_said_in_one_sentence(
  refusal, tiny_directory, tmp_path, arguments, sentence
):
  output = tmp_path / "new" / "kept.html"
  told = refusal(
    "kvjax.experiments.show_kept",
    f"--model={tiny_directory}",
    f"--output={output}",
    *arguments,
  )
  assert sentence in told
  assert not output.parent.exists()


def test_a_picture_shows_the_shares_and_marks_the_needle():
  pieces = ["It is", " 4", "2", ".", "\n"]
  needle = passages.find(pieces, "42")
  assert needle.tolist() == [1, 2]
  shares = np.linspace(0, 0.3, 10).reshape(2, 5)
  figure = pictures.draw({"a $method$": shares}, pieces, needle)
  above, below, _ = figure.axes
  np.testing.assert_array_equal(above.images[0].get_array(), shares)
  words = {text.get_text(): text.get_color() for text in below.texts}
  assert [*words] == [piece.replace("\n", "↵") for piece in pieces]
  assert words[" 4"] == words["2"] != words["It is"]
  assert above.get_title(loc="left") == "a $method$"
  # Several methods share a picture without the words.
  names = ("a", "b", "c")
  maps = {name: shares + n for n, name in enumerate(names)}
  figure = pictures.draw(maps, pieces, needle)
  for number, (axes, name) in enumerate(zip(figure.axes, names, strict=False)):
    assert axes.get_title(loc="left") == name
    np.testing.assert_array_equal(axes.images[0].get_array(), shares + number)
    assert not axes.texts


@pytest.mark.parametrize("name", pictures.PAGES)
def test_the_page_of_a_method_shows_a_small_picture(name):
  page_of_method = ROOT / "docs" / "methods" / f"{name}.md"
  assert f"(../images/kept_{name}.png)" in page_of_method.read_text()
  picture = ROOT / "docs" / "images" / f"kept_{name}.png"
  assert picture.stat().st_size < 60_000
