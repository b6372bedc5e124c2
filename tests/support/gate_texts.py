"""Short documents for the training of gates."""

import numpy as np

WORDS = "the file has been read and so have others near a cellar door".split()


def write_texts(folder):
  """Writes two documents of random words; returns the folder."""
  random = np.random.default_rng(0)
  for name in ("a.txt", "b.md"):
    text = " ".join(random.choice(WORDS, 90))
    (folder / name).write_text(text, encoding="utf-8")
  return folder
