"""How binaries start, and how they tell a user what was wrong."""

import sys
import warnings
from collections.abc import Callable, Sequence

import jax
from absl import app, flags, logging

from kvjax import user_cache
from kvjax.errors import InputError, InputWarning

_WRONG_INPUT = 2
_INTERRUPTED = 130
_KEPT_BYTES = 2**31
_FORMATTED = warnings.formatwarning


def run(main: Callable[[], None]) -> None:
  """Parses the flags and calls `main`.

  What the user can mend, wrong flags included, becomes one sentence on stderr
  and exit code 2.
  """

  def alone(arguments: Sequence[str]) -> None:
    if arguments:
      raise InputError(
        f"There is no argument {arguments[0]!r}; flags look like --name=value."
      )
    main()

  run_on_arguments(alone)


def run_on_arguments(main: Callable[[Sequence[str]], None]) -> None:
  """The same with what stands on the command line beside the flags."""
  # JAX's notes on the machine are for --verbosity=0.
  logging.set_verbosity(logging.WARNING)
  warnings.formatwarning = _formatted
  _keep_programs()

  def guarded(argv: Sequence[str]) -> None:
    try:
      main(argv[1:])
    except InputError as error:
      _refuse(str(error))
    except KeyboardInterrupt:
      print("Stopped.", file=sys.stderr)
      sys.exit(_INTERRUPTED)

  app.run(guarded, flags_parser=_parse)


def refuse_together(one: str, others: Sequence[str], reason: str) -> None:
  """Refuses flags that were given although another makes them void.

  Raises:
    InputError: flag `one` and at least one of `others` were given.
  """
  if not flags.FLAGS[one].present:
    return
  for other in others:
    if flags.FLAGS[other].present:
      raise InputError(f"--{one} and --{other} do not go together: {reason}.")


def _keep_programs() -> None:
  """Keeps what takes long to compile for later runs, if JAX is not told where.

  In the user's cache folder, least recently used programs go first.
  """
  if jax.config.jax_compilation_cache_dir is None:
    folder = str(user_cache.folder("programs"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_max_size", _KEPT_BYTES)


def _formatted(
  message: Warning | str,
  category: type[Warning],
  filename: str,
  lineno: int,
  line: str | None = None,
) -> str:
  """Warnings about the user's input as sentences, others with their place."""
  if issubclass(category, InputWarning):
    return f"{message}\n"
  return _FORMATTED(message, category, filename, lineno, line)


def _parse(argv: Sequence[str]) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
  except SystemExit:  # --help has been printed, which absl calls a failure
    sys.exit(0)
  except flags.Error as error:
    sentence = " ".join(str(error).split()).removesuffix(".").removesuffix(" ?")
    _refuse(f"{sentence}; --help lists the flags.")
  return rest


def _refuse(sentence: str) -> None:
  print(sentence, file=sys.stderr)
  sys.exit(_WRONG_INPUT)
