"""How right a color is."""


def hue(sample, said):
  """Finds the color, and whether the shade is said, too."""
  text = "" if said.is_cut else said.text
  return {
    "score": float(any(answer in text for answer in sample.answers)),
    "shade": float(sample.metadata["shade"] in text),
  }
