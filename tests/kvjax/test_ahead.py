"""Programs of a sweep and of its answers are compiled together."""

import threading

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.engine import ahead
from kvjax.engine.ahead import Call, compile_together
from kvjax.struct import tree_bytes
from kvjax.testing import TinyModel

METHODS = "keydiff", "snapkv", "adakv", "pyramidkv", "h2o"


@pytest.fixture
def compiled():
  """Names of the threads that compile."""
  threads: list[str] = []

  def listener(event: str, duration: float, **_: object) -> None:
    del duration
    if event == "/jax/core/compile/backend_compile_duration":
      threads.append(threading.current_thread().name)

  jax.monitoring.register_event_duration_secs_listener(listener)
  yield threads
  jax.monitoring.unregister_event_duration_listener(listener)


def doubled(count):
  """A program of its own, and a call of it."""
  program = jax.jit(lambda x: count * x)
  return Call(program, {"x": jnp.arange(3.0)}, {})


def test_calls_find_their_programs_compiled(compiled):
  calls = [doubled(2), doubled(3)]
  del compiled[:]
  compile_together(calls)
  assert len(compiled) == 2
  assert "MainThread" not in compiled
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

  monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
  compile_together(Call(Program(), {}, {}) for _ in range(2))


def test_what_fails_to_compile_says_so_and_stops_the_rest():
  class Lowered:
    def compile(self):
      raise ValueError("too large")

  class Program:
    def lower(self, **arrays):
      del arrays
      return Lowered()

  with pytest.raises(ValueError, match="too large"):
    compile_together(Call(Program(), {}, {}) for _ in range(2))


def test_hosts_compile_one_after_another(monkeypatch, compiled):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  call = doubled(5)
  del compiled[:]
  compile_together([call])
  assert not compiled


def test_nothing_is_compiled_within_another_program():
  @jax.jit
  def outer(x):
    call = Call(jax.jit(lambda x: x + 1), {"x": x}, {})
    compile_together([call])
    return call()

  assert float(outer(1.0)) == 2


def test_a_sweep_and_its_answers_compile_nothing_twice(compiled):
  model = TinyModel()
  params = model.init(seed=1)
  # Sizes that no other test has.
  prompts = kvjax.Prompts.of([list(range(1, 39)), list(range(1, 24))], 44)
  plans = [
    kvjax.get_plan(name, kvjax.Retention(share))
    for name in METHODS
    for share in (0.5, 0.25)
  ]
  del compiled[:]
  caches, _ = kvjax.sweep(model, params, prompts, plans)
  of_sweep = [name for name in compiled if name != "MainThread"]
  # Scores of each method, and what the plans select and keep.
  assert len(of_sweep) > 2 * len(METHODS)
  del compiled[:]
  questions = kvjax.Prompts.of([[7, 8], [9]], 4)
  decoding = kvjax.Decoding(max_new_tokens=3)
  answers = kvjax.generate(model, params, caches, questions, decoding)
  groups = kvjax.group_caches(caches, tree_bytes(params))
  assert len(groups) > 1
  assert len([name for name in compiled if name != "MainThread"]) == len(groups)
  for cache, answer in zip(caches, answers, strict=True):
    alone = kvjax.generate(model, params, cache, questions, decoding)
    assert alone.tokens.tolist() == answer.tokens.tolist()
