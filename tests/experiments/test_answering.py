"""Caches that are asked together, their room, shapes and first tokens."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
from made_runs import MEASURED

import kvjax
from kvjax.experiments.run import answering, batching, comparison, prompting
from kvjax.experiments.run.candidates import Candidate, candidates
from kvjax.experiments.run.results import Part
from kvjax.experiments.tasks.sample import Sample
from kvjax.testing import kept_positions


def a_layer(capacity, kv_dtype):
  layer = kvjax.LayerCache(
    jnp.zeros((1, 1, capacity, 2), jnp.float32),
    jnp.zeros((1, 1, capacity, 2), jnp.float32),
    jnp.zeros((1, 1, capacity), jnp.int32),
    jnp.zeros((), jnp.int32),
  )
  return layer if kv_dtype is None else layer.quantize(kv_dtype)


def a_cache(*capacities, plan=None, kv_dtype=None):
  """Layers of these capacities, equal ones in one stack."""
  kinds = list(dict.fromkeys(capacities))
  stacks = tuple(
    jax.tree.map(
      lambda *leaves: jnp.stack(leaves),
      *[a_layer(kind, kv_dtype)] * capacities.count(kind),
    )
    for kind in kinds
  )
  order = tuple(map(kinds.index, capacities))
  return kvjax.Cache(stacks, jnp.zeros(1, jnp.int32), None, order, plan)


def test_caches_of_equal_sizes_are_asked_together():
  caches = [a_cache(*n) for n in ((8, 8), (4, 4), (8, 4), (4, 4), (4, 8))]
  assert kvjax.group_caches(caches) == [[0], [1, 3], [2], [4]]


def test_only_what_is_stored_alike_is_asked_together():
  dtypes = [None, "int8", None, "int8", "fp8"]
  caches = [a_cache(8, 8, kv_dtype=dtype) for dtype in dtypes]
  assert kvjax.group_caches(caches) == [[0, 2], [1, 3], [4]]


def test_who_evicts_while_decoding_is_asked_alone():
  plan = kvjax.get_plan(
    "keydiff", kvjax.Tokens(4), schedule=kvjax.Schedule(every=2)
  )
  caches = [a_cache(4, 4), a_cache(4, 4), a_cache(4, 4, plan=plan)]
  assert kvjax.group_caches(caches) == [[0, 1], [2]]


def test_widths_are_shared_by_neighboring_lengths():
  prompts = [prompting.Prompt([0] * n, [0] * 5, 1) for n in (33, 60)]
  assert prompting.Shape.of(prompts, 4) == (4, 64, 8)


def test_a_conversation_has_room_for_a_retention_of_all_that_is_said():
  """A context of 64 tokens leaves 48 at 75 %, and two turns of 36 follow it.

  The 136 tokens in the end are padded to 192, of which 144 may be held, and 4
  more until the next eviction: 48 + 72 slots would be too few.
  """
  going_on = kvjax.Schedule(every=4)
  (one,) = candidates(["streaming"], [kvjax.Retention(0.75)], going_on)[1:]
  turns = [prompting.Prompt([0] * 64, [0] * 32, 4, stays=True)] * 2
  shape = prompting.Shape(1, 64, 32)
  cache = answering._with_capacity(a_cache(48, plan=one.plan), turns, shape)
  assert [layer.capacity for layer in cache.layers] == [144 + 32 + 4]
  tokens = candidates(["streaming"], [kvjax.Tokens(48)], going_on)[1].plan
  for plan in (None, tokens):
    cache = answering._with_capacity(a_cache(48, plan=plan), turns, shape)
    assert [layer.capacity for layer in cache.layers] == [48 + 2 * (32 + 4)]


def test_a_cache_is_freed_when_it_has_been_joined(tiny, monkeypatch):
  """And small groups come first, while the large caches are still there."""
  joined, sizes, stack = [], [], kvjax.stack

  def watch(caches):
    joined.append([weakref.ref(cache.stacks[0].keys) for cache in caches])
    sizes.append(sum(cache.nbytes for cache in caches))
    return stack(caches)

  monkeypatch.setattr(kvjax, "stack", watch)
  # The limit of this small model's weights would join all budgets.
  monkeypatch.setattr(answering, "tree_bytes", lambda params: 0)
  shares = [kvjax.Retention(share) for share in (0.75, 0.5, 0.25)]
  chosen = candidates(["full", "streaming", "random"], shares)
  prompts = [[prompting.Prompt([5] * 96, [0] * 4, 2)] for _ in range(2)]
  shape = prompting.Shape(2, 96, 8)
  answered = []
  for replies in answering.replies(
    tiny, chosen, prompts, shape, answering.Seconds()
  ):
    answered += [reply.candidate for reply in replies]
    *before, last = [sum(one() is not None for one in of) for of in joined]
    assert not any(before)
    # A single cache is not copied, and decodes itself.
    assert last == (len(joined[-1]) == 1)
  assert sizes == sorted(sizes)
  assert sorted(map(len, joined)) == [1, 2, 2, 2]
  assert sorted(map(chosen.index, answered)) == sorted([*range(7)] * 2)


def test_evicted_tokens_count_where_the_others_are_renumbered(tiny):
  chosen = candidates(["rerotate/keydiff"], [kvjax.Retention(0.25)])[1:]
  turn = prompting.Prompt([5] * 96, [7] * 4, 2, stays=True)
  groups = answering.replies(
    tiny,
    chosen,
    [[turn, turn]] * 2,
    prompting.Shape(2, 96, 8),
    answering.Seconds(),
  )
  replies = [reply for group in groups for reply in group]
  # After questions of 4 tokens and answers of 2.
  counts = [(96 + 6, 24.0 + 6)] * 2 + [(96 + 12, 24.0 + 12)] * 2
  assert [(r.context_tokens, r.kept_tokens) for r in replies] == counts
  assert {reply.retention for reply in replies[:2]} == {0.25}


def test_the_caches_of_a_conversation_are_freed_before_it_has_room(
  tiny, monkeypatch
):
  """The room for its turns is another copy."""
  parts, alive, stack = [], [], kvjax.stack
  with_capacity = answering._with_capacity

  def watch(caches):
    parts[:] = [weakref.ref(cache.stacks[0].keys) for cache in caches]
    return stack(caches)

  def room(*args):
    alive.append(sum(part() is not None for part in parts))
    return with_capacity(*args)

  monkeypatch.setattr(kvjax, "stack", watch)
  monkeypatch.setattr(answering, "_with_capacity", room)
  chosen = candidates(["streaming", "random"], [kvjax.Retention(0.5)])[1:]
  turn = prompting.Prompt([5] * 96, [0] * 4, 2, stays=True)
  for _ in answering.replies(
    tiny,
    chosen,
    [[turn, turn]] * 2,
    prompting.Shape(2, 96, 8),
    answering.Seconds(),
  ):
    pass
  assert len(parts) == 2
  assert alive == [0]


def test_bytes_are_those_of_each_cache_alone(tiny, monkeypatch):
  """Whether caches are joined or not."""
  shares = [kvjax.Retention(share) for share in (0.5, 0.25)]
  chosen = candidates(["full", "streaming", "adakv"], shares)
  prompts = [[prompting.Prompt([5] * 96, [0] * 4, 2)] for _ in range(2)]
  shape = prompting.Shape(2, 96, 8)

  def measured():
    groups = list(
      answering.replies(tiny, chosen, prompts, shape, answering.Seconds())
    )
    return len(groups), {
      (chosen.index(reply.candidate), reply.row): (
        reply.cache_bytes,
        reply.decoding_bytes,
      )
      for replies in groups
      for reply in replies
    }

  count, joined = measured()
  assert count == 2
  monkeypatch.setattr(answering, "tree_bytes", lambda params: 0)
  count, alone = measured()
  assert count == 5
  assert joined == alone
  assert len(set(alone.values())) == 5


def test_the_first_token_of_a_passkey_is_scored(tiny):
  sample = Sample(
    context="The pass key is 8712.",
    question="What is it?",
    answer_prefix=" It is",
    answers=("8712",),
    task="passkey",
    max_new_tokens=5,
    metadata={},
    metric="passkey",
    key="8712",
  )
  prompt = prompting.Prompt.of_sample(tiny.tokenizer, sample)
  part = Part("passkey", 128)
  context = batching.Context(part, [0], [sample], [prompt])
  (full, *_) = candidates(["full"], [kvjax.Retention(1.0)])
  found = []
  for text in (" 8712", " 8999", " 9712", ""):
    tokens = tiny.tokenizer.encode(text)
    reply = answering.Reply(full, 0, 0, tokens, text, **MEASURED)
    answer = comparison._answer(context, reply, tiny.tokenizer)
    found.append(answer.scores["first_key_token"])
  assert found == [100, 100, 0, 0]
  other = dataclasses.replace(sample, key=None)
  prompt = prompting.Prompt.of_sample(tiny.tokenizer, other)
  assert prompt.key_token is None


def test_a_protected_prompt_stays_while_its_answer_is_decoded(tiny):
  tokens = [int(n) for n in jax.random.randint(jax.random.key(0), (20,), 1, 99)]
  plan = kvjax.get_plan(
    "keydiff", kvjax.Tokens(24), schedule=kvjax.Schedule(every=4)
  )
  candidate = Candidate("keydiff", plan)
  decoding = kvjax.Decoding(max_new_tokens=40)
  evicted = {}
  for protected in (False, True):
    prompt = prompting.Prompt(tokens, [], 40, protected)
    shape = prompting.Shape.of([prompt], 1, prompting.QUERY_AWARE)
    prefilled = answering._prefill(tiny, [candidate], [[prompt]], shape)[0]
    cache = kvjax.generate(
      tiny.model,
      tiny.params,
      kvjax.reserve(prefilled.cache, 40),
      prefilled.logits,
      decoding,
      keep=True,
    ).cache
    heads = [head for layer in kept_positions(cache, 0) for head in layer]
    assert {len(head) for head in heads} == {24}
    evicted[protected] = sum(len({*range(20)} - {*head}) for head in heads)
  assert evicted[False] > 0
  assert evicted[True] == 0
