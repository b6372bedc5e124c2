"""A replay of a prompt by `TinyModel`, written out in float64."""

import numpy as np


def rotate(x, positions):
  half = x.shape[-1] // 2
  angles = positions[:, None] * 100.0 ** (-np.arange(half) / half)[None]
  low, high = x[..., :half], x[..., half:]
  cos, sin = np.cos(angles), np.sin(angles)
  return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def softmax(logits, axis=-1):
  weights = np.exp(logits - logits.max(axis, keepdims=True))
  return weights / weights.sum(axis, keepdims=True)


class Written:
  """The layers of a `TinyModel`, one row at a time."""

  def __init__(self, model, params):
    def wide(x):
      return np.asarray(x, np.float64)

    self.specs = model.geometry.layers
    self.embedding = wide(params["embedding"])
    self.layers = [
      {name: wide(x[n]) for name, x in params["layers"][spec.weights].items()}
      for spec, n in zip(self.specs, model.geometry.weight_index, strict=True)
    ]

  def run(self, tokens, start=0, past=None, added=None):
    """Runs tokens after `past`; what each layer sees.

    `added` [L, n, E] joins what attention adds to the residual.
    """
    hidden = self.embedding[np.asarray(tokens, int)]
    positions = start + np.arange(len(tokens))
    found = []
    for number, (spec, weights) in enumerate(
      zip(self.specs, self.layers, strict=True)
    ):
      if not spec.cache:
        hidden = hidden + np.tanh(hidden @ weights["square"])
        found.append({"outputs": hidden})
        continue

      def project(name, heads, hidden=hidden, weights=weights):
        x = hidden @ weights[name]
        return x.reshape(len(x), heads, -1).swapaxes(0, 1)

      queries = rotate(project("query", spec.heads), positions)
      keys = rotate(project("key", spec.kv_heads), positions)
      values = project("value", spec.kv_heads)
      seen = {"queries": queries, "own_keys": keys, "inputs": hidden}
      if past is not None:
        keys = np.concatenate([past[number]["keys"], keys], axis=1)
        values = np.concatenate([past[number]["values"], values], axis=1)
      seen |= {"keys": keys, "values": values, "output": weights["output"]}
      group = spec.heads // spec.kv_heads
      scale = spec.key_dim**-0.5 if spec.scale is None else spec.scale
      logits = queries @ keys.repeat(group, 0).swapaxes(1, 2) * scale
      if spec.softcap is not None:
        logits = spec.softcap * np.tanh(logits / spec.softcap)
      apart = positions[:, None] - np.arange(keys.shape[1])[None]
      before = apart >= 0
      if spec.window is not None:
        before &= apart < spec.window
      logits = np.where(before[None], logits, -np.inf)
      seen["logits"] = logits
      if spec.sinks:
        sinks = np.broadcast_to(
          weights["sinks"][:, None, None], (*logits.shape[:2], 1)
        )
        shares = softmax(np.concatenate([logits, sinks], -1))[..., :-1]
      else:
        shares = softmax(logits)
      out = shares @ values.repeat(group, 0)
      joined = out.swapaxes(0, 1).reshape(len(tokens), -1)
      branch = joined @ weights["output"]
      if added is not None:
        branch = branch + added[number]
      if spec.parallel:
        branch = branch + np.tanh(hidden @ weights["square"])
      hidden = hidden + branch
      found.append(seen | {"outputs": hidden})
    return found


def gradients(written, tokens, start, past, step=1e-5):
  """Norms [L, n] of the gradient of Phi, by central differences."""
  width = written.embedding.shape[1]
  shape = (len(written.specs), len(tokens), width)

  def phi(added):
    return (written.run(tokens, start, past, added)[-1]["outputs"] ** 2).sum()

  def slope(index):
    added = np.zeros(shape)
    added[index] = step
    return (phi(added) - phi(-added)) / (2 * step)

  slopes = [slope(index) for index in np.ndindex(*shape)]
  return np.linalg.norm(np.reshape(slopes, shape), axis=-1)


def scores(model, params, row, request, replay):
  """Scores [N, n] of each layer; -1 where nothing is replayed or evicted."""
  written = Written(model, params)
  past = written.run(row)
  prefix = 0
  while prefix < min(len(row), len(request.prefix)):
    if row[prefix] != request.prefix[prefix]:
      break
    prefix += 1
  result = [
    np.full((spec.heads, len(row)), -1.0) for spec in model.geometry.layers
  ]
  for start in range(prefix, len(row), replay.chunk):
    chunk = row[start : start + replay.chunk]
    asked = [*request.first]
    if start > prefix:
      before = row[start - replay.chunk : start]
      asked = [*request.later, *before[-replay.overlap :]]
    asked = [*asked, *request.suffix, *chunk]
    seen = written.run(asked, len(row), past)
    if replay.weight == "gradient":
      slopes = gradients(written, asked, len(row), past)
    sinks = min(replay.sinks or prefix, start)
    columns = [
      *range(sinks),
      *range(start, start + len(chunk)),
      *range(len(row), len(row) + len(asked)),
    ]
    for layer, of_layer in enumerate(seen):
      if not model.geometry.layers[layer].compressible:
        continue
      logits = of_layer["logits"][:, :, columns]
      if "sinks" in written.layers[layer]:
        own = written.layers[layer]["sinks"][:, None, None]
        own = np.broadcast_to(own, (*logits.shape[:2], 1))
        logits = np.concatenate([logits, own], axis=-1)
      weights = softmax(logits)[:, :, sinks : sinks + len(chunk)]
      if replay.weight != "attention":
        spec = model.geometry.layers[layer]
        values = of_layer["values"][:, start : start + len(chunk)]
        values = values.repeat(spec.heads // spec.kv_heads, 0)
        out = values @ of_layer["output"].reshape(spec.heads, -1, model.width)
        weights = weights * np.linalg.norm(out, axis=-1)[:, None]
      if replay.weight == "output":
        norms = np.linalg.norm(of_layer["inputs"], axis=-1)
        weights = weights / norms[None, :, None]
      if replay.weight == "gradient":
        weights = weights * slopes[layer][None, :, None]
      result[layer][:, start : start + len(chunk)] = weights.max(axis=1)
  return result
