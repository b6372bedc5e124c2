"""The engine's prefills and decoding loops for models on TPUs or a GPU."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

import kvjax
from kvjax import kernels
from kvjax.cache.cache import Cache
from kvjax.cache.sharding import layer_spec
from kvjax.cache.sparse import SparseLayer
from kvjax.engine.compiler_options import decoding_options
from kvjax.engine.decode import DecodedTokens, DecodingInputs, decode
from kvjax.engine.sampling import SamplingInputs
from kvjax.experiments.compilation.calls import compile_calls, measure_calls
from kvjax.experiments.compilation.chips import Chip
from kvjax.experiments.compilation.programs import Lowered, Program
from kvjax.experiments.compilation.published import (
  GEMMA,
  GPT_OSS,
  LLAMA,
  Published,
)
from kvjax.kernels.compiled.footprints import Footprint
from kvjax.kernels.programs import Platform
from kvjax.models.language_model import DecoderModel
from kvjax.placement import DEVICE, HOST, is_on_host

_ANSWER = 128
# The program that a prefill waits for in every layer; see
# `kvjax.engine.sweeping`.
LAYER = "forward_layer"
# As many tokens as models' own requests to repeat a prompt have, about.
REQUEST = kvjax.RepeatRequest((1,) * 20, (2,) * 10, (3,) * 15, (4,) * 5)


@dataclasses.dataclass(frozen=True)
class Use:
  """A method at a size.

  Attributes:
    name: name of the method.
    shapes: how many of how many tokens it keeps or reads, in words.
    plan: the plan.
    tokens: length of the prompts.
    model: the model.
    rows: number of prompts.
    answer: tokens that are decoded for each.
  """

  name: str
  shapes: str
  plan: kvjax.Plan
  tokens: int
  model: Published = LLAMA
  rows: int = 1
  answer: int = _ANSWER

  @property
  def decoding(self) -> kvjax.Decoding:
    """How it decodes."""
    return kvjax.Decoding(max_new_tokens=self.answer)


def _use(
  name: str,
  shapes: str,
  share: float = 0.25,
  tokens: int = 32_768,
  model: Published = LLAMA,
  **options: Any,
) -> Use:
  plan = kvjax.get_plan(name, kvjax.Retention(share), **options)
  return Use(name, shapes, plan, tokens, model)


_QUARTER = "25 % of 32,768 tokens"
COMPACTOR = _use("compactor", _QUARTER)
KEYDIFF = _use(
  "keydiff", f"{_QUARTER}, in blocks of 512", schedule=kvjax.Schedule(block=512)
)
KEYDIFF_IN_INT8 = _use("keydiff", f"{_QUARTER}, in int8", kv_dtype="int8")
# Heads with different numbers of tokens: a paged cache.
ADAKV_IN_INT8 = _use("ada/snapkv", f"{_QUARTER}, in int8", kv_dtype="int8")
CTKVR = _use("ctkvr.512:offload=true", "65,536 tokens", 1.0, 65_536)
CTKVR_ON_DEVICE = _use("ctkvr.512", "65,536 tokens", 1.0, 65_536)
# Most of their layers are rings of a window, which no method compresses.
HYBRIDS = tuple(
  _use(
    "keydiff",
    f"25 % of 131,072 tokens, {model.name}",
    tokens=131_072 - _ANSWER,
    model=model,
  )
  for model in (GEMMA, GPT_OSS)
)


def engine_programs(
  layers: int | None = None, platform: Platform = "tpu"
) -> Iterator[Program]:
  """Yields prefills, and decoding from their caches.

  Args:
    layers: number of layers of Llama, which is then the only model; None for
      all models as they are.
    platform: that of the chips.
  """
  # Where no GPU is attached, XLA puts everything into a GPU's own memory.
  retrieval = CTKVR if platform == "tpu" else CTKVR_ON_DEVICE
  hybrids = HYBRIDS if layers is None else ()
  layers = LLAMA.layers if layers is None else layers
  for use in (COMPACTOR, KEYDIFF):
    yield _program("prefill", use, lower_prefill, layers)
  for use in (COMPACTOR, KEYDIFF_IN_INT8, ADAKV_IN_INT8, retrieval):
    yield _program("decode", use, lower_decode, layers)
  for use in hybrids:
    yield _program("decode", use, lower_decode, use.model.layers)


def _program(
  kind: str, use: Use, lower: Callable[[Use, int, Chip], Lowered], layers: int
) -> Program:
  return Program(
    kind,
    use.name,
    f"{use.shapes}, {layers} layers",
    functools.partial(lower, use, layers),
  )


def lower_prefill(use: Use, layers: int, chip: Chip) -> Lowered:
  """Traces the programs that `kvjax.prefill` calls in sequence.

  They are lowered when they are measured, since the sharding of one program's
  results, which the next one takes, is known only after its compilation.
  """
  model, params = use.model.shapes(chip.mesh, layers)
  jaxpr, given = trace_prefill(model, params, use, chip)

  def measure() -> Footprint:
    replicated = NamedSharding(chip.mesh, PartitionSpec())
    within = functools.partial(compiling_for, chip)
    calls = compile_calls(jaxpr, given, replicated, within)
    return measure_calls(calls, awaited=LAYER)

  return Lowered(measure)


def trace_prefill(
  model: DecoderModel, params: nnx.State, use: Use, chip: Chip
) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
  """Traces `kvjax.prefill`; returns its jaxpr and argument shapes."""
  given = params, _tokens(chip, use)
  with compiling_for(chip):
    jaxpr = jax.make_jaxpr(_prefill(model, use))(*given)
  return jaxpr, jax.tree.leaves(given)


def lower_decode(use: Use, layers: int, chip: Chip) -> Lowered:
  """Lowers the decoding loop for a cache of `kvjax.prefill`."""
  model, params = use.model.shapes(chip.mesh, layers)
  with compiling_for(chip):
    cache = cache_shapes(model, params, use, chip)

    def loop(
      params: nnx.State,
      cache: Cache,
      logits: Float[Array, "B V"],
      seeds: Int[Array, " B"],
    ) -> tuple[DecodedTokens, Cache]:
      most = jnp.int32(use.answer)
      drawn = SamplingInputs.of(use.decoding.sampling)
      run = DecodingInputs(seeds, None, None, most, drawn)
      return decode(model, params, cache, logits, use.decoding, run)

    traced = jax.jit(loop, donate_argnames="cache").trace(
      params,
      cache,
      _replicated(chip, (use.rows, model.config.vocab_size), jnp.float32),
      _replicated(chip, (use.rows,), jnp.int32),
    )
    read = share_bytes(on_device((params, cache)))
    ideal = read - unread(model, params)
    host = share_bytes(offloaded(cache))
    options = decoding_options()
    return Lowered.of(traced, ideal, host, turn=True, options=options)


def on_device(tree: PyTree) -> list[jax.ShapeDtypeStruct]:
  """Returns the arrays that are not in host memory."""
  return [x for x in jax.tree.leaves(tree) if not is_on_host(x)]


def share_bytes(tree: PyTree) -> int:
  """Counts the bytes of a device's shard of some shapes."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def unread(
  model: DecoderModel,
  params: nnx.State,
  nbytes: Callable[[PyTree], int] = share_bytes,
) -> int:
  """Counts the bytes of weights that one token does not need.

  Args:
    model: the model.
    params: its weights, or their shapes.
    nbytes: counts those of a tree; by default of a device's shards.
  """
  # Of the embedding, it reads one row, or all as the output matrix.
  tied = model.config.tie_embeddings
  spared = 0 if tied else nbytes(params["embed_tokens"])
  sizes = model.config.experts
  if sizes is not None:
    experts = [
      stack["mlp"]["experts"]
      for stack in params["layers"].values()
      if "experts" in stack["mlp"]
    ]
    idle = sizes.count - sizes.per_token
    spared += nbytes(experts) * idle // sizes.count
  return spared


@contextlib.contextmanager
def compiling_for(chip: Chip) -> Iterator[None]:
  """Traces for a chip and its mesh what is traced within."""
  with jax.set_mesh(chip.mesh), kernels.use(platform=chip.platform):
    yield


def _replicated(
  chip: Chip, shape: tuple[int, ...], dtype: Any
) -> jax.ShapeDtypeStruct:
  """Describes a replicated array."""
  place = NamedSharding(chip.mesh, PartitionSpec())
  return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def _tokens(chip: Chip, use: Use) -> jax.ShapeDtypeStruct:
  return _replicated(chip, (use.rows, use.tokens), jnp.int32)


def _prefill(
  model: DecoderModel, use: Use
) -> Callable[..., tuple[Cache, Float[Array, "B V"]]]:
  """Builds a prefill of rows without padding."""

  def run(
    params: nnx.State, tokens: Int[Array, "B S"]
  ) -> tuple[Cache, Float[Array, "B V"]]:
    lengths = np.full(tokens.shape[0], use.tokens, np.int32)
    prompts = kvjax.Prompts(tokens, lengths, repeat_request=REQUEST)
    return kvjax.prefill(model, params, prompts, use.plan)

  return run


def cache_shapes(
  model: DecoderModel, params: nnx.State, use: Use, chip: Chip
) -> Cache:
  """Computes the shapes of a prefill's cache with capacity to decode."""

  def prefilled(params: nnx.State, tokens: Int[Array, "B S"]) -> Cache:
    cache, _ = _prefill(model, use)(params, tokens)
    return kvjax.reserve(cache, use.answer)

  return placed_shapes(jax.eval_shape(prefilled, params, _tokens(chip, use)))


def placed_shapes(cache: Cache) -> Cache:
  """Gives the shapes of a cache the places that they have on a mesh.

  Args:
    cache: shapes of a cache; the mesh is in context.
  """
  mesh = jax.sharding.get_mesh()
  specs: list[PartitionSpec] = []

  def place(cache: Cache) -> Cache:
    known: dict[int, PartitionSpec | None] = {}

    def record(tree: PyTree, axes: Sequence[str]) -> PyTree:
      for leaf in jax.tree.leaves(tree):
        known[id(leaf)] = layer_spec(leaf.shape, axes, leading=1)
      return tree

    stacks = tuple(stack.place(record) for stack in cache.stacks)
    cache = dataclasses.replace(cache, stacks=stacks)
    for leaf in jax.tree.leaves(cache):
      specs.append(known.get(id(leaf)) or PartitionSpec())
    return cache

  def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    memory = HOST if is_on_host(x) else DEVICE
    sharding = NamedSharding(mesh, next(places), memory_kind=memory)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  shapes = jax.eval_shape(place, cache)
  places = iter(specs)
  made: Cache = jax.tree.map(placed, shapes)
  return made


def offloaded(cache: Cache) -> PyTree:
  """Returns the arrays that belong in host memory."""
  return [
    (stack.stored.keys, stack.stored.values)
    for stack in cache.stacks
    if isinstance(stack, SparseLayer) and stack.retrieval.offload
  ]
