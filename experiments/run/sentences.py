"""Says what a program has to say, in lines that are not broken.

`rich` would break them at 80 columns where the output is piped, and would read
`[..]` in paths as markup; it prints tables only.
"""

from kvjax.experiments.run import multihost, sending


def say(text: str) -> None:
  """Prints a sentence to stdout, of many hosts on the first one."""
  if multihost.is_first():
    print(sending.named(text), flush=True)
