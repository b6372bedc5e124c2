"""Renders chat templates in a process of its own; see `templates`.

It is started by the path of this file, with nothing but Jinja installed. It
reads requests, a line of JSON each, and answers each with one.
"""

import datetime
import functools
import json
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

# Address space, most of which Python and Jinja do not need.
_MEMORY = 2**30
# Characters of a rendered chat.
_LONGEST = 2**26
# Characters of an error.
_SAID = 200


def main() -> None:
  """Answers requests until there are no more."""
  _limit_memory()
  for line in sys.stdin.buffer:
    request = json.loads(line.decode("utf-8", "surrogatepass"))
    _limit_time(request.pop("seconds"))
    reply = json.dumps(_answer(**request), ensure_ascii=False)
    sys.stdout.buffer.write(reply.encode("utf-8", "surrogatepass") + b"\n")
    sys.stdout.buffer.flush()
    _limit_time(0)


def _answer(source: str, variables: dict[str, Any] | None) -> dict[str, str]:
  """Renders a template, or only compiles it if there are no variables.

  Returns:
    The text, empty if there are no variables, or the error in words.
  """
  try:
    template = _compile(source)
    text = "" if variables is None else template.render(variables)
    if len(text) > _LONGEST:
      return {"error": f"it makes a text of {len(text):,} characters"}
    return {"text": text}
  except MemoryError:
    return {"error": f"it takes more than {_MEMORY >> 20:,} MiB of memory"}
  except RecursionError:
    return {"error": "it calls itself, or is nested, too deeply"}
  except Exception as error:  # A template can raise anything.
    said = " ".join(str(error).split()) or type(error).__name__
    return {"error": said[:_SAID].removesuffix(".")}


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
  """Compiles a chat template in the same environment as transformers."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    loader=jinja2.FunctionLoader(_refuse_other),
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = _strftime_now
  return environment.from_string(source)


class _Generation(jinja2.ext.Extension):
  """Support of `{% generation %}` blocks, which have no effect here."""

  tags = {"generation"}  # noqa: RUF012

  def parse(self, parser: Any) -> Any:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """Formats JSON without the HTML escapes of Jinja's filter."""
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _refuse_other(name: str) -> None:
  raise jinja2.TemplateError(f"it includes another template, {name!r}")


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _limit_memory() -> None:
  try:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
  except (ImportError, ValueError, OSError):
    # Windows has no such limit, and macOS keeps none. There, memory is bounded
    # by what can be filled within the time that `templates` allows.
    pass


def _limit_time(seconds: float) -> None:
  """Ends the process after so many seconds of computing; 0 for no limit.

  The signal needs no handler, which Python would not call in the middle of one
  long operation. Seconds in which a busy machine does something else do not
  count. Windows has no such timer; there, the parent counts.
  """
  if hasattr(signal, "setitimer"):
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
  main()
