"""The tables of docs/sharding.md: what devices send each other to decode.

    python -m kvjax.experiments.planning.step_collectives

compiles a decoding step of every method for four CPU devices, on meshes of
several shapes, and writes the tables into the page, from the root of the
repository.
"""

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import files
from kvjax.cache.cache import Cache
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.engine.capacity import grow_for, prepare_decoding
from kvjax.engine.decode import DecodedTokens, DecodingInputs, decode
from kvjax.engine.query_statistics import QueryStatistics
from kvjax.experiments import cli
from kvjax.experiments.compilation.engine_programs import REQUEST, placed_shapes
from kvjax.experiments.compilation.published import Published
from kvjax.experiments.report import formats, page_parts, wording
from kvjax.kernels.compiled.collectives import (
  Collective,
  collectives,
  counts,
  total_bytes,
)
from kvjax.kernels.compiled.hlo import Module
from kvjax.registry.registry import METHODS, RETRIEVALS

PAGE = pathlib.Path("docs", "sharding.md")
# Two KV heads: on the last three meshes, a row has more devices than heads.
MESHES = (
  *("data:4", "model:2", "data:2,model:2"),
  *("model:4", "context:4", "context:2,model:2"),
)
LAYERS, ROWS, TOKENS = 2, 4, 1024
KEPT = TOKENS // 4
LENGTHS = np.full(ROWS, TOKENS, np.int32)
# Small but for its keys.
MODEL = Published(
  "tiny",
  {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4 * TOKENS,
    "tie_word_embeddings": True,
  },
)
_EVERY = 16
_DECODING = kvjax.Decoding(32)
_PARTS = {"steps": False, "evicting_steps": True}


@dataclasses.dataclass(frozen=True)
class Step:
  """A step that decodes a token of each row.

  Attributes:
    name: name of the method.
    evicts: whether the method evicts tokens after the step.
    file: option that names a file of the method, after its name.
  """

  name: str
  evicts: bool = False
  file: str = dataclasses.field(default="", compare=False)

  @functools.cached_property
  def plan(self) -> kvjax.Plan:
    """Keeps a quarter of the prompts.

    Raises:
      InputError: the step evicts, and the method does not while it decodes.
    """
    kept = TOKENS if self.name == "full" else KEPT
    schedule = kvjax.Schedule(every=_EVERY if self.evicts else None)
    return kvjax.get_plan(
      self.name + self.file, kvjax.Retention(kept / TOKENS), schedule=schedule
    )


# Methods that are made with a file, and those that send the same.
ALIKE = {
  Step("kvzap"): Step("kvzip"),
  Step("fast_kvzip"): Step("kvzip"),
  Step("qfilters", evicts=True): Step("keydiff", evicts=True),
  Step("kvzap:level=head", evicts=True): Step("keydiff", evicts=True),
  Step("fast_kvzip:level=head", evicts=True): Step("keydiff", evicts=True),
}
# Those that evict by statistics, and send what no other method does.
_BY_STATISTICS = ("triattention", "triattention:choice=model")


def steps(statistics: pathlib.Path) -> list[Step]:
  """Lists the steps of all methods but `ALIKE`, those that evict at the end.

  Args:
    statistics: a file of statistics of the model's queries.
  """
  names = [*METHODS, "think/snapkv", *RETRIEVALS]
  plain = [step for step in map(Step, names) if step not in ALIKE]
  evicting = [Step(name, evicts=True) for name in filter(_evicts, METHODS)]
  file = f":statistics={statistics}"
  by_file = [Step(name, True, file) for name in _BY_STATISTICS]
  return plain + evicting + by_file


def write_statistics(folder: pathlib.Path) -> pathlib.Path:
  """Writes statistics of the model's queries, whose values do not matter."""
  config = MODEL.config(LAYERS)
  heads = (LAYERS, config.num_heads, config.head_dim)
  mean = np.ones(heads, np.float32)
  path = folder / "queries.safetensors"
  QueryStatistics(
    mean,
    np.ones((*heads, config.head_dim), np.float32),
    mean[:, : config.num_kv_heads],
    mean,
  ).save(path)
  return path


def _evicts(name: str) -> bool:
  """Whether a method evicts tokens while it decodes, without a file."""
  try:
    plan = Step(name, evicts=True).plan
  except kvjax.InputError:
    return False
  return not plan.keeps_prompts


def sent(
  step: Step, axes: str, published: Published = MODEL
) -> list[Collective]:
  """Compiles a step; lists the collectives that it runs on each device.

  Args:
    step: the step.
    axes: the mesh, as in `--mesh`.
    published: the model, of `LAYERS` layers.
  """
  mesh = split_mesh(parse_mesh(axes), published.kv_heads)
  model, params = published.shapes(mesh, LAYERS)

  def prefilled(params: nnx.State, tokens: Int[Array, "B S"]) -> Cache:
    prompts = kvjax.Prompts(tokens, LENGTHS, repeat_request=REQUEST)
    cache, _ = kvjax.prefill(model, params, prompts, step.plan)
    prepared = prepare_decoding(model, cache, LENGTHS, 0, _DECODING)
    return grow_for(cache, prepared, 0, _DECODING)

  with jax.set_mesh(mesh):
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
    cache = placed_shapes(jax.eval_shape(prefilled, params, tokens))
    leaves, structure = jax.tree.flatten(cache)
    return _compiled(published, mesh, structure, tuple(leaves))


@functools.cache
def _compiled(
  published: Published,
  mesh: jax.sharding.Mesh,
  structure: jax.tree_util.PyTreeDef,
  leaves: tuple[jax.ShapeDtypeStruct, ...],
) -> list[Collective]:
  """Compiles a step once for all methods whose caches are alike.

  Args:
    published: the model.
    mesh: the mesh, which is in context.
    structure: that of the cache.
    leaves: shapes of its arrays.
  """
  model, params = published.shapes(mesh, LAYERS)

  def loop(
    params: nnx.State,
    cache: Cache,
    logits: Float[Array, "B V"],
    seeds: Int[Array, " B"],
  ) -> tuple[DecodedTokens, Cache]:
    prepared = prepare_decoding(model, cache, LENGTHS, 0, _DECODING)
    most = jnp.int32(_DECODING.max_new_tokens)
    run = DecodingInputs(seeds, None, prepared, most)
    return decode(model, params, cache, logits, _DECODING, run)

  compiled = jax.jit(loop, donate_argnames="cache").lower(
    params,
    jax.tree.unflatten(structure, leaves),
    jax.ShapeDtypeStruct((ROWS, model.config.vocab_size), jnp.float32),
    jax.ShapeDtypeStruct((ROWS,), jnp.int32),
  )
  text = compiled.compile().as_text()
  return collectives(Module.of(text or ""), turn=True)


def cell(found: list[Collective]) -> str:
  """Formats collectives: how often each kind runs, and the bytes of all."""
  kinds = [f"{number} {opcode}" for opcode, number in counts(found).items()]
  if not kinds:
    return wording.NOTHING
  return f"{', '.join(kinds)}: {total_bytes(found):,}"


def replace_tables(page: str, cells: Mapping[Step, Sequence[str]]) -> str:
  """Returns the page with its tables as they are now.

  Args:
    page: text of the page, with the marks before and after the tables.
    cells: of each step, what it sends on each of `MESHES`; see `cell`.
  """
  for part, evicts in _PARTS.items():
    every = {**cells, **{step: cells[other] for step, other in ALIKE.items()}}
    rows = {step.name: every[step] for step in every if step.evicts == evicts}
    page = page_parts.replace(page, part, _table(rows))
  return page


def _table(rows: Mapping[str, Sequence[str]]) -> str:
  """Formats a table; methods that send the same share a line."""
  alike: dict[tuple[str, ...], list[str]] = {}
  for name, sizes in rows.items():
    alike.setdefault(tuple(sizes), []).append(f"`{name}`")
  header = ["method", *(f"`{axes}`" for axes in MESHES)]
  lines = [(", ".join(names), *sizes) for sizes, names in alike.items()]
  return formats.grid(header, lines, left=range(len(header)))


def main() -> None:
  """Compiles all steps, and writes the tables."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 4)
  page = files.read_text(PAGE)
  with tempfile.TemporaryDirectory() as folder:
    cells = {
      step: [cell(sent(step, axes)) for axes in MESHES]
      for step in steps(write_statistics(pathlib.Path(folder)))
    }
  files.write_text(PAGE, replace_tables(page, cells))


if __name__ == "__main__":
  cli.run(main)
