"""Programs of a sweep and of its answers are compiled together."""

import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.engine import ahead
from kvjax.engine.ahead import Call, compile_together
from kvjax.struct import tree_bytes
from kvjax.testing import TinyModel

METHODS = "keydiff", "snapkv", "adakv", "pyramidkv", "h2o"


class Compiled(NamedTuple):
  """A program that was compiled, and the thread that did it."""

  program: str
  thread: str


@pytest.fixture
def compiled():
  """What is compiled, in order."""
  found: list[Compiled] = []

  def listener(event: str, duration: float, **given: object) -> None:
    del duration
    if event == "/jax/core/compile/backend_compile_duration":
      thread = threading.current_thread().name
      name = str(given["fun_name"]).removeprefix("jit(").removesuffix(")")
      found.append(Compiled(name, thread))

  jax.monitoring.register_event_duration_secs_listener(listener)
  yield found
  jax.monitoring.unregister_event_duration_listener(listener)


def programs(compiled, *, ahead):
  """Names of the programs of a sweep that were compiled ahead, or not."""
  of_sweep = {
    "evaluate_layer",
    "select_layer",
    "_empty_stack",
    "keep_layer",
    "generate_and_discard",
  }
  return [
    each.program
    for each in compiled
    if (each.thread != "MainThread") == ahead and each.program in of_sweep
  ]


def doubled(count):
  """A program of its own, and a call of it."""
  program = jax.jit(lambda x: count * x)
  return Call(program, {"x": jnp.arange(3.0)}, {})


def test_calls_find_their_programs_compiled(compiled):
  calls = [doubled(2), doubled(3)]
  compile_together([])
  del compiled[:]
  compile_together(calls)
  assert len(compiled) == 2
  assert "MainThread" not in {each.thread for each in compiled}
  assert [call().tolist() for call in calls] == [[0, 2, 4], [0, 3, 6]]
  assert len(compiled) == 2


def test_calls_of_one_program_compile_it_once(compiled):
  call = doubled(4)
  del compiled[:]
  compile_together([call, call])
  compile_together([call])
  assert len(compiled) == 1


def test_programs_are_compiled_at_the_same_time(monkeypatch):
  both = threading.Barrier(2, timeout=60)

  class Lowered:
    def compile(self):
      both.wait()

  class Program:
    def lower(self, **arrays):
      del arrays
      return Lowered()

  monkeypatch.setattr(ahead, "_threads", lambda: 2)
  compile_together(Call(Program(), {}, {}) for _ in range(2))


def test_what_fails_to_compile_says_so_and_stops_the_rest(monkeypatch):
  tried = []

  class Lowered:
    def compile(self):
      tried.append(self)
      if len(tried) == 1:
        raise ValueError("too large")
      time.sleep(0.2)

  class Program:
    def lower(self, **arrays):
      del arrays
      return Lowered()

  monkeypatch.setattr(ahead, "_threads", lambda: 1)
  with pytest.raises(ValueError, match="too large"):
    compile_together(Call(Program(), {}, {}) for _ in range(50))
  # The thread may have begun another one meanwhile.
  assert len(tried) < 50


def test_hosts_compile_one_after_another(monkeypatch, compiled):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  call = doubled(5)
  del compiled[:]
  compile_together([call])
  assert not compiled


def test_nothing_is_compiled_within_another_program(compiled):
  inner = jax.jit(lambda: jnp.arange(4.0))

  @jax.jit
  def outer(x):
    compile_together([Call(inner, {}, {})])
    return x + inner()[1]

  assert float(outer(1.0)) == 2
  assert [each.program for each in compiled if each.program == "<lambda>"] == []


@pytest.mark.parametrize("committed", [False, True])
def test_a_sweep_and_its_answers_compile_nothing_twice(compiled, committed):
  model = TinyModel()
  params = model.init(seed=1)
  if committed:
    params = jax.device_put(params, jax.devices()[0])
  # Sizes that no other test has.
  width = 45 if committed else 44
  prompts = kvjax.Prompts.of([list(range(1, 39)), list(range(1, 24))], width)
  plans = [
    kvjax.get_plan(name, kvjax.Retention(share))
    for name in METHODS
    for share in (0.5, 0.25)
  ]
  del compiled[:]
  caches, _ = kvjax.sweep(model, params, prompts, plans)
  # Scores of each method, and what the plans select and keep.
  assert len(programs(compiled, ahead=True)) > 2 * len(METHODS)
  assert programs(compiled, ahead=False) == []
  del compiled[:]
  questions = kvjax.Prompts.of([[7, 8], [9]], 4)
  decoding = kvjax.Decoding(max_new_tokens=3)
  answers = kvjax.generate(model, params, caches, questions, decoding)
  groups = kvjax.group_caches(caches, tree_bytes(params))
  assert len(groups) > 1
  assert len(programs(compiled, ahead=True)) == len(groups)
  assert programs(compiled, ahead=False) == []
  for cache, answer in zip(caches, answers, strict=True):
    alone = kvjax.generate(model, params, cache, questions, decoding)
    assert alone.tokens.tolist() == answer.tokens.tolist()
