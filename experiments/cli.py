"""Starts programs and reports user errors."""

import itertools
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
from absl import app, flags, logging

from kvjax import addresses, files, user_cache
from kvjax.errors import InputError, InputWarning, readable
from kvjax.experiments import exits, help_pages, interrupts
from kvjax.experiments.inputs import plugin_inputs
from kvjax.experiments.run import (
  device_failures,
  multihost,
  plugin_failures,
  plugin_files,
  sending,
)
from kvjax.registry.parsing import suggest

_CACHE_BYTES = 2**31
# The largest number of a flag, and the longest text in a message.
_LARGEST = 2**31 - 1
_LONGEST = 300
# Flags of files and folders that a program only reads.
_FETCHED = {"model", "data", "documents", "essay", "text", "calibrations"}
_FLAG_FILES = ("--flagfile", "-flagfile")
# Flags of kvpress, and which of ours take their place.
_OF_KVPRESS = {
  "compression_ratio": (
    "retention",
    ", the share that is kept (1 - compression_ratio)",
  ),
  "press_name": ("methods", ""),
}
# How the help of a program begins to say what it takes with the default flags.
_BY_DEFAULT = "It takes "
# Flags that do not change that, but what is drawn and where it is written.
_AS_LONG = {"output", "seed"}
# Flags of programs that run on several hosts.
_OF_HOSTS = ("multihost", "coordinator", "hosts", "host", "host_timeout")
# With them, how much is kept depends on the context.
_BY_CONTEXT = ("threshold", "tau", "calibrations")
_python_format = warnings.formatwarning
# What absl says of values that Python does not convert.
_UNCONVERTED = re.compile(
  r"flag --(\w+)=(.*): "
  r"(?:invalid literal for|could not convert|\('Non-boolean).*",
  re.DOTALL,
)
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def run(
  main: Callable[[], None],
  *,
  sends: bool = False,
  connect: Callable[[], None] = lambda: None,
) -> None:
  """Parses the flags and calls `main`.

  A user error, such as a wrong flag, prints one sentence to stderr and exits
  with code 2; of several hosts, the first one prints. So does a full disk or a
  path that cannot be used. SIGINT ends the program with code 130, and SIGTERM,
  which schedulers send before they take a machine away, with code 143, both
  within two seconds, but for work that is saved or sent first.

  Args:
    main: the program.
    sends: whether --output may be an address; see `sending`.
    connect: connects the hosts of a program that takes --multihost. It comes
      before inputs are fetched, so that all hear if one cannot, and before
      plugins run, which may touch a device.
  """

  def without_arguments(arguments: Sequence[str]) -> None:
    if arguments:
      raise InputError(
        f"There is no argument {arguments[0]!r}; flags look like --name=value."
      )
    main()

  run_on_arguments(without_arguments, sends=sends, connect=connect)


def run_on_arguments(
  main: Callable[[Sequence[str]], None],
  *,
  sends: bool = False,
  connect: Callable[[], None] = lambda: None,
) -> None:
  """Parses the flags and calls `main` with the other arguments; see `run`."""
  # Hide JAX's messages about the machine; --verbosity=0 shows them.
  logging.set_verbosity(logging.WARNING)
  warnings.formatwarning = _formatted
  _cache_programs()

  def guarded(argv: Sequence[str]) -> None:
    try:
      with interrupts.interruptible(), sending.sending():
        _check_names()
        _check_values(sends)
        connect()
        _fetch_inputs()
        plugin_files.load(plugin_inputs.PLUGINS.value or ())
        main(argv[1:])
    except InputError as error:
      _refuse(str(error))
    except BrokenPipeError:
      raise
    except OSError as error:
      if error.strerror is None:
        raise
      path = readable(str(error.filename or "A file"), _LONGEST)
      _refuse(f"{path} cannot be used: {error.strerror}.")
    except exits.RefusedError as refused:
      _say_refused(str(refused))
    except exits.StoppedError as stopped:
      if str(stopped):
        print(stopped, file=sys.stderr)
      exits.leave(exits.PREEMPTED)
    except SystemExit as stop:
      if said := plugin_failures.sentence(stop):
        _refuse(said)
      raise
    except Exception as error:
      explain = (
        device_failures.of_kernel,
        device_failures.of_memory,
        plugin_failures.sentence,
      )
      if said := next(filter(None, (say(error) for say in explain)), None):
        logging.info("The error in full:", exc_info=True)
        _refuse(said)
      if jax.distributed.is_initialized():
        traceback.print_exc()
        exits.leave(1)
      raise
    except KeyboardInterrupt as stop:
      # A second one ends the program at once, without a traceback either.
      for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
      print("Stopped.", file=sys.stderr)
      preempted = isinstance(stop, exits.Preempted)
      exits.leave(exits.PREEMPTED if preempted else exits.INTERRUPTED)

  with exits.quiet_when_unread():
    app.run(guarded, flags_parser=_parse)


def _check_names() -> None:
  """Refuses flags of other programs, which this one's imports define."""
  own = help_pages.own_flags()
  shared = {
    name
    for name in flags.FLAGS
    if (flags.FLAGS.find_module_defining_flag(name) or "").startswith("kvjax.")
  }
  if not shared & own:
    return  # A script of somebody's own, which imports a program and its flags.
  for name in shared - own:
    if flags.FLAGS[name].present:
      raise InputError(_no_flag(name))


def _check_values(sends: bool) -> None:
  """Refuses values that no flag of any program can mean."""
  known = {*_FETCHED, "output"} if sends else _FETCHED
  for flag in (flags.FLAGS[name] for name in flags.FLAGS):
    value = flag.value
    if flag.present and isinstance(value, str) and not value.strip():
      raise InputError(
        f"--{flag.name} is empty; give it a value, or leave it out."
      )
    if isinstance(value, str) and flag.name not in known:
      addresses.check_local(value)
    if type(value) is int and abs(value) > _LARGEST:
      shown = readable(str(value), _LONGEST)
      raise InputError(
        f"--{flag.name} is {shown}; the largest number is {_LARGEST}."
      )


def _fetch_inputs() -> None:
  """Copies what is at addresses to this machine, and names the copies."""
  for name in _FETCHED & set(flags.FLAGS):
    flag = flags.FLAGS[name]
    value: object = flag.value
    if flag.present and isinstance(value, str) and addresses.is_address(value):
      flag.value = str(addresses.fetch(value))


def announce() -> None:
  """Says on stderr how long the program takes, in the words of its help.

  It is for programs that do not estimate it themselves. What a program takes by
  its help, it takes with the default flags.
  """
  said = help_pages.duration(sys.modules["__main__"].__doc__ or "")
  own = help_pages.own_flags() - _AS_LONG
  if said.startswith(_BY_DEFAULT) and any(map(_is_changed, own)):
    said = f"With the default flags, i{said[1:]}"
  if said and multihost.is_first():
    print(said, file=sys.stderr, flush=True)


def _is_changed(name: str) -> bool:
  """Whether a flag with a default was given another value."""
  flag = flags.FLAGS[name]
  return flag.default not in (None, flag.value)


def _cache_programs() -> None:
  """Caches compiled programs for later runs, unless JAX already has a cache.

  The cache is in the user's cache folder and evicts the least recently used.
  """
  if jax.config.jax_compilation_cache_dir is None:
    folder = str(user_cache.folder("programs"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    # By default only programs that compile for a second: half of the time.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


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
  return _python_format(message, category, filename, lineno, line)


def _parse(argv: Sequence[str]) -> list[str]:
  if help_pages.asked(argv[1:]):
    text = sys.modules["__main__"].__doc__ or ""
    print(help_pages.page(sys.argv[0], text))
    sys.exit(0)
  try:
    # absl reads files of flags, of which one may have no end.
    parts = (part for each in argv for part in each.split("=", 1))
    for name, value in itertools.pairwise(parts):
      if name in _FLAG_FILES:
        files.check_whole(value)
    rest = flags.FLAGS(argv)
  except (InputError, OSError) as error:
    said = error.strerror if isinstance(error, OSError) else None
    _refuse(f"The --flagfile cannot be read: {said}." if said else str(error))
  except SystemExit:  # absl exits with 1 after printing --helpfull
    sys.exit(0)
  except flags.UnrecognizedFlagError as error:
    _refuse(_no_flag(error.flagname))
  except flags.Error as error:
    _refuse(f"{readable(_said_by(error), _LONGEST)}; --help lists the flags.")
  return rest


def _said_by(error: flags.Error) -> str:
  """What absl says of a flag; where it quotes Python, what the flag takes."""
  sentence = " ".join(str(error).split()).removesuffix(".").removesuffix(" ?")
  found = _UNCONVERTED.fullmatch(sentence)
  kind = found and _KINDS.get(flags.FLAGS[found[1]].flag_type())
  if not found or not kind:
    return sentence
  return f"--{found[1]} takes {kind}, not {found[2]!r}"


def _no_flag(name: str) -> str:
  own = help_pages.own_flags()
  if name in _OF_HOSTS:
    return (
      f"This program runs on one host, without --{name}; evaluate, compare, "
      "trials, reproduce, retrieval_recall, calibrate, calibrate_queries, "
      "train_gate and finetune run on several."
    )
  if name in _BY_CONTEXT and "budget" in own:
    return (
      f"There is no --{name} here, by which contexts decide how much of them "
      "is kept: give --retention or --budget."
    )
  guess, shown = suggest(name, own), readable(name, _LONGEST)
  if "trials" in own:
    return (
      f"There is no flag --{shown} of trials{guess}; flags of evaluate come "
      "after --, as in kvjax trials --trials=2 -- --methods=keydiff."
    )
  flag, meaning = _OF_KVPRESS.get(name, ("", ""))
  if flag in own:
    guess = f"; give --{flag}{meaning}"
  return f"There is no flag --{shown}{guess}; --help lists the flags."


def _refuse(sentence: str) -> NoReturn:
  """Ends the program on all hosts, with a sentence from the first one."""
  _say_refused(multihost.refuse(readable(sentence)))


def _say_refused(sentence: str) -> NoReturn:
  if multihost.is_first():
    print(sending.named(sentence), file=sys.stderr)
  exits.leave(exits.WRONG_INPUT)
