"""Starts programs and reports user errors."""

import sys
import warnings
from collections.abc import Callable, Sequence

import jax
from absl import app, flags, logging

from kvjax import user_cache
from kvjax.errors import InputError, InputWarning

_WRONG_INPUT = 2
_INTERRUPTED = 130
_CACHE_BYTES = 2**31
_FORMATTED = warnings.formatwarning


def run(main: Callable[[], None]) -> None:
  """Parses the flags and calls `main`.

  A user error, such as a wrong flag, prints one sentence to stderr and exits
  with code 2.
  """

  def without_arguments(arguments: Sequence[str]) -> None:
    if arguments:
      raise InputError(
        f"There is no argument {arguments[0]!r}; flags look like --name=value."
      )
    main()

  run_on_arguments(without_arguments)


def run_on_arguments(main: Callable[[Sequence[str]], None]) -> None:
  """Parses the flags and calls `main` with the remaining arguments."""
  # Hide JAX's messages about the machine; --verbosity=0 shows them.
  logging.set_verbosity(logging.WARNING)
  warnings.formatwarning = _formatted
  _cache_programs()

  def guarded(argv: Sequence[str]) -> None:
    try:
      main(argv[1:])
    except InputError as error:
      _refuse(str(error))
    except KeyboardInterrupt:
      print("Stopped.", file=sys.stderr)
      sys.exit(_INTERRUPTED)

  app.run(guarded, flags_parser=_parse)


def refuse_together(one: str, excluded: Sequence[str], reason: str) -> None:
  """Rejects flags that another given flag makes meaningless.

  Raises:
    InputError: flag `one` and at least one of `excluded` were given.
  """
  if not flags.FLAGS[one].present:
    return
  for other in excluded:
    if flags.FLAGS[other].present:
      raise InputError(f"--{one} and --{other} do not go together: {reason}.")


def _cache_programs() -> None:
  """Caches compiled programs for later runs, unless JAX already has a cache.

  The cache is in the user's cache folder and evicts the least recently used.
  """
  if jax.config.jax_compilation_cache_dir is None:
    folder = str(user_cache.folder("programs"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)


def _formatted(
  message: Warning | str,
  category: type[Warning],
  filename: str,
  lineno: int,
  line: str | None = None,
) -> str:
  """Formats input warnings as sentences, others with their location."""
  if issubclass(category, InputWarning):
    return f"{message}\n"
  return _FORMATTED(message, category, filename, lineno, line)


def _parse(argv: Sequence[str]) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
  except SystemExit:  # absl exits with 1 after printing --help
    sys.exit(0)
  except flags.Error as error:
    sentence = " ".join(str(error).split()).removesuffix(".").removesuffix(" ?")
    _refuse(f"{sentence}; --help lists the flags.")
  return rest


def _refuse(sentence: str) -> None:
  print(sentence, file=sys.stderr)
  sys.exit(_WRONG_INPUT)
