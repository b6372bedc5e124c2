"""What a calibration says before it measures."""

import math

from kvjax.experiments.report import wording


def too_few(tau: float, flag: str, samples: int, parts: int) -> str:
  """Says if the promises of n contexts, at most n / (n + 1), are below tau.

  Args:
    tau: share of quality to preserve.
    flag: name of the flag that says how many samples promise.
    samples: their number per part.
    parts: number of tasks times that of lengths.
  """
  if tau == 1:
    return ""
  needed = math.ceil(tau / (1 - tau) - 1e-9)
  if samples * parts >= needed:
    return ""
  return (
    f"{wording.count(samples * parts, 'context')} of --{flag} cannot promise "
    f"--tau={tau:g}, so every context is kept whole; {needed} can, as "
    f"--{flag}={math.ceil(needed / parts)} draws."
  )
