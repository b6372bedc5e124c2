"""The loop of a worker: a request a line in, a measurement a line out.

It imports nothing but the standard library, as a worker may run in another
environment, where kvjax is not installed.
"""

import contextlib
import json
import os
import pathlib
import sys
import traceback

# Prompts are random ids below this; every vocabulary has more.
TOKEN_IDS = 1000
# Linux: writing 5 to the first resets the peak that the second contains.
_RESET = pathlib.Path("/proc/self/clear_refs")
_STATUS = pathlib.Path("/proc/self/status")


class Memory:
  """Memory that a library takes: the process's, on a CPU."""

  def reset(self) -> None:
    """Starts a new peak."""
    with contextlib.suppress(OSError):
      _RESET.write_text("5")

  def peak(self) -> int | None:
    """Returns the peak of resident memory in bytes; None if it is unknown."""
    with contextlib.suppress(OSError):
      for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
          return 1024 * int(line.split()[1])
    return None


def serve(side: object, memory: Memory) -> None:
  """Answers requests until stdin ends.

  A request is a JSON object with the name of an operation in "do", and its
  arguments. The answer has what it returned in "result" (seconds, for most) and
  the peak of memory during it in "peak", in bytes; or in "error" the last line
  of what went wrong.

  Args:
    side: has a method for each operation.
    memory: of the device that computes.
  """
  answers = os.fdopen(os.dup(1), "w")
  # What libraries print must not get between the answers.
  os.dup2(2, 1)
  for line in sys.stdin:
    request = json.loads(line)
    memory.reset()
    try:
      result = getattr(side, request.pop("do"))(**request)
      answer = {"result": result, "peak": memory.peak()}
    except Exception as error:
      traceback.print_exc()
      answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)
