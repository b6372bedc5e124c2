"""Chat templates that loop, recurse, crash or fill the memory get a sentence.

Whatever they do, they end in time, and the next one is rendered.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvjax.errors import InputError
from kvjax.experiments.reference import vocabulary
from kvjax.models import templates
from kvjax.models.tokenizer import Tokenizer

MESSAGE = "{{ messages[0].content }}"
NESTED = "{%% for a in range(99999) %%}{%% for b in range(99999) %%}%s"
ENDED = "{% endfor %}{% endfor %}"
NAMES = "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"

# By what is said of them. Those of the first two are ended by the one or the
# other limit, depending on the machine.
LIMIT = "it takes more than|it makes a text of"
HOSTILE = {
  LIMIT: [
    NESTED % ENDED,
    NESTED % f"aaaaaaaaaa{ENDED}",
    "{{ 'a' * 10**10 }}",
    "{{ messages[0].content * 10**10 }}",
    "{{ 10 ** (10 ** 8) }}",
    "{% set n = 9 + messages|length %}{{ n ** (n ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%100000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 10**10) }}",
    "{{ '%100000000000d'|format(1) }}",
    "{{ strftime_now('%Y' * 10**8) }}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a\nb'|indent(10**10) }}",
    "{{ [1]|batch(10**9, 0)|list|length }}",
    "{{ [1]|slice(10**9)|list|length }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ '\t'.expandtabs(2**31 - 1) }}",
    "{{ ('a' * 10**6)|join('b' * 10**6) }}",
    "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
    "{{ [1]|tojson(indent=10**10) }}",
    "{{ ('a ' * 10**7)|wordwrap(1, wrapstring='b' * 10**4) }}",
    "{{ lipsum(n=10**6) }}",
    NAMES + "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    NAMES + "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    NAMES + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    NAMES
    + "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
    + "{{ n.x == n.y }}",
    "{% set x = 'a' %}"
    + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60
    + "{{ x }}",
    "{{ 1 }}" * 200_000,
  ],
  "it calls itself, or is nested, too deeply": [
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(300) }}",
    "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "{% block x %}{{ self.x() }}{% endblock %}",
    "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
    "{{ " + "[" * 10_000 + "]" * 10_000 + " }}",
    "{{ " + "-" * 10_000 + "1 }}",
    "{% if 1 %}" * 1000 + "{% endif %}" * 1000,
  ],
  "Range too big": [
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ range(10**9)|list }}",
  ],
  "it includes another template, 'x'": [
    "{% include 'x' %}",
    "{% include 'x' ignore missing %}",
    "{% import 'x' as y %}",
    "{% from 'x' import y %}",
    "{% extends 'x' %}",
  ],
  "division by zero|modulo by zero": [
    "{{ 1 / 0 }}",
    "{{ 1 // 0 }}",
    "{{ 1 % 0 }}",
    "{% set zero = messages|length - 1 %}{{ 1 / zero }}",
  ],
  "must be str, not int": ["{{ strftime_now(5) }}"],
  "missing 1 required positional argument": [
    "{{ strftime_now() }}",
    "{{ raise_exception() }}",
  ],
  "unsafe": [
    "{{ ''.__class__.__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ messages.append(1) }}",
    "{% set x = [1] %}{% for a in x %}{{ x.append(1) }}{% endfor %}",
  ],
  "is undefined|has no": [
    "{{ missing.field }}",
    "{{ messages[9].content }}",
    "{{ {}['a'].b }}",
  ],
  "is not valid": [
    "{% if %}",
    "{% nosuch %}",
    "{{ 1|nosuch }}",
    "{% break %}",
    "{{",
  ],
  "can only concatenate|not supported|unsupported": [
    "{{ 'a' + 1 }}",
    "{{ [1, 'a']|sort }}",
    "{{ ['a']|sum }}",
  ],
  "4300 digits": ["{{ 7 ** 20000 }}"],
  "Numerical result out of range": ["{{ 2.0 ** 99999 }}"],
  "message: a b; correct": ["{{ raise_exception('a\n\n  b.') }}"],
  "message: 5; correct": ["{{ raise_exception(5) }}"],
  "message: a{200}; correct": ["{{ raise_exception('a' * 10**6) }}"],
  "half of a surrogate pair|message exactly once": ["{{ '\\ud800' }}"],
}
CASES = [
  (source, sentence) for sentence in HOSTILE for source in HOSTILE[sentence]
]


def rendered(source):
  return Tokenizer(vocabulary.build(), {}, chat_template=source).split_chat("a")


@pytest.mark.parametrize(
  ("source", "sentence"), CASES, ids=map(str, range(len(CASES)))
)
def test_a_hostile_template_gets_one_sentence(monkeypatch, source, sentence):
  if sentence == LIMIT:
    monkeypatch.setattr(templates, "SECONDS", 0.3)
  began = time.monotonic()
  with pytest.raises(InputError, match=sentence) as caught:
    rendered(source)
  assert "\n" not in str(caught.value)
  assert str(caught.value).endswith(".")
  assert len(str(caught.value)) < 400
  # A process that was killed is started again, by the next template.
  assert time.monotonic() - began < 30


def test_a_template_has_two_seconds():
  rendered(MESSAGE)
  began = time.monotonic()
  with pytest.raises(InputError, match="it takes more than 2 seconds; correct"):
    rendered(NESTED % ENDED)
  assert 2 <= time.monotonic() - began < 8
  assert rendered(MESSAGE + "!") == ("a", "!")


def test_one_process_serves_all_threads():
  found = {}
  lines = [f"{number} é 日 \u2028 \0 " * 1000 for number in range(8)]
  tokenizer = Tokenizer(vocabulary.build(), {}, chat_template=MESSAGE + "!")

  def ask(line):
    found[line] = [tokenizer.split_chat(line) for _ in range(5)]

  threads = [threading.Thread(target=ask, args=(line,)) for line in lines]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == {line: [(line, "!")] * 5 for line in lines}
  (worker,) = templates._workers.values()
  assert worker._process.poll() is None


def test_a_process_that_ends_is_started_again():
  rendered(MESSAGE)
  process = templates._worker()._process
  process.kill()
  process.wait()
  assert rendered(MESSAGE) == ("a", "")


def test_an_interrupt_does_not_mix_up_answers(monkeypatch):
  """The answer to what was interrupted is never taken for the next one."""
  rendered(MESSAGE)
  process = templates._worker()._process
  timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
  timer.start()
  with pytest.raises(KeyboardInterrupt):
    rendered(NESTED % ENDED)
  assert process.poll() is not None
  assert rendered(MESSAGE + "?") == ("a", "?")


ALONE = """
import os, signal
from templates import ChatTemplate
template = ChatTemplate("{{ a }}")
child = os.fork()
assert template.render({"a": "b"}) == "b"
if child == 0:
  os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert template.render({"a": "c"}) == "c"
"""


def test_a_fork_has_a_process_of_its_own_and_none_is_left_behind():
  folder = pathlib.Path(templates.__file__).parent  # without all of kvjax
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", ALONE],
    cwd=folder,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stderr) == (0, "")


def test_without_a_python_there_is_a_sentence(monkeypatch):
  templates._worker().stop()
  monkeypatch.setattr(sys, "executable", "/nowhere/python")
  with pytest.raises(InputError, match=r"cannot be started \(No such file"):
    rendered(MESSAGE)
