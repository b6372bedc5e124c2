"""Flags for the model, its devices and its dtype, and their values."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from absl import flags, logging

from kvjax import hosts, kernels, models
from kvjax.cache.sharding import parse_mesh, parse_sizes, split_mesh
from kvjax.errors import InputError, warn
from kvjax.experiments.benchmarks import hub
from kvjax.experiments.inputs import plugin_inputs
from kvjax.experiments.inputs.number_lists import parse_numbers
from kvjax.experiments.run import model_digest, multihost, results, tuned_tables
from kvjax.kernels.mesh_axes import CONTEXT
from kvjax.models import catalog
from kvjax.models.config import DecoderConfig
from kvjax.models.language_model import as_shapes
from kvjax.models.pretrained import DTYPES
from kvjax.models.sharding import copies
from kvjax.models.sources import DecoderSource, find

flags.adopt_module_key_flags(plugin_inputs)

DEFAULT = "smollm2-135m-instruct"
REFERENCE = catalog.REFERENCE

MODEL = flags.DEFINE_string(
  "model",
  DEFAULT,
  f"A model that is fetched once, {', '.join(catalog.NAMED)}; the small one "
  f"that comes with kvjax, {REFERENCE}; a Hugging Face directory, or one of a "
  "family that a file of --plugins registers; or a GGUF file.",
)
# More than this are never answered, and do not fit into memory.
MOST_SAMPLES = 100_000
SEED = flags.DEFINE_integer(
  "seed",
  0,
  "Seed of samples, and of random methods, sketches and hashes that are named "
  "without one.",
  lower_bound=0,
)
BATCH = flags.DEFINE_integer(
  "batch",
  12,
  "Contexts per prefill; fewer are used if their caches do not fit in memory.",
  lower_bound=1,
)
_MESH = flags.DEFINE_string(
  "mesh",
  None,
  "Device mesh, as in data:2,model:2; context:2 shares out the tokens of whole "
  "prompts.",
)
_KERNELS = flags.DEFINE_string(
  "kernels",
  "auto",
  "auto: Pallas kernels where the device supports them; xla: XLA's programs "
  "only; select:xla,gather:xla: XLA's for these operations, which are among "
  f"{', '.join(kernels.OPERATIONS)}.",
)
_KERNELS_TABLE = flags.DEFINE_string(
  "kernels_table",
  None,
  "File of kvjax tune: block sizes of kernels, by kind of device.",
)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  None,
  DTYPES,
  "Dtype of the computation; by default float32 on CPUs, bfloat16 elsewhere.",
)

# The flags of programs that prefill no batches of samples.
ALONE = ("model", "plugins", "mesh", "kernels", "kernels_table", "dtype")

# It takes seconds per GiB of a model's files.
_digest = functools.cache(model_digest.digest)


def settings() -> results.Settings:
  """Returns what these flags say of a run, for all of its answers."""
  return results.Settings(
    model=model_name(),
    weights=_digest(model_directory()),
    dtype=dtype(),
    seed=SEED.value,
  )


@contextlib.contextmanager
def loaded() -> Iterator[tuple[models.Pretrained, int]]:
  """Loads the model, on the mesh if given; yields it and the device count."""
  logging.info("Loading %s in %s", MODEL.value, dtype())
  with chosen_kernels():
    if _MESH.value is None:
      yield models.load(MODEL.value, dtype()), 1
      return
    mesh = _split(parse_mesh(_MESH.value))
    with jax.set_mesh(mesh), multihost.together():
      if hosts.spanned():
        # Loading is a program of all hosts already.
        multihost.check_same({"weights": _digest(model_directory())})
      if BATCH.present:
        check_batch()
      yield models.load(MODEL.value, dtype(), mesh), mesh.size


def span_hosts(axis: str = "data") -> None:
  """Lets the mesh span all hosts, unless --mesh says how.

  Args:
    axis: the axis along which it does.

  Raises:
    InputError: the mesh has devices of one host.
  """
  if multihost.count() == 1:
    return
  if _MESH.value is None:
    flags.FLAGS["mesh"].value = f"{axis}:{jax.device_count()}"
  elif not mesh_spans_hosts():
    raise InputError(
      f"--mesh={_MESH.value} has devices of one host, and this program works "
      f"on all hosts together; give a mesh of all {jax.device_count()} devices."
    )


def mesh_spans_hosts() -> bool:
  """Whether --mesh has devices of several hosts."""
  return _MESH.value is not None and parse_mesh(_MESH.value).is_multi_process


@contextlib.contextmanager
def chosen_kernels() -> Iterator[None]:
  """Runs the kernels that --kernels asks for, as --kernels_table says."""
  implementation, overrides = _kernels(_KERNELS.value)
  with kernels.use(implementation, overrides=overrides), chosen_table():
    yield


@contextlib.contextmanager
def chosen_table() -> Iterator[None]:
  """Gives kernels the options of --kernels_table."""
  path = _KERNELS_TABLE.value
  table = {} if path is None else tuned_tables.read(pathlib.Path(path))
  with kernels.use_table(table):
    yield


def _split(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
  """Splits the axis "model" for the model's KV heads, and warns of copies."""
  source = find(MODEL.value)
  if not isinstance(source, DecoderSource):
    return mesh
  config = source.config
  split = split_mesh(mesh, config.num_kv_heads)
  model, weights = as_shapes(config, dtype())
  copied = copies(weights, model.geometry, split)
  if copied.axes:
    whole = {
      "kv_heads": f"{config.num_kv_heads} KV heads",
      "heads": f"{config.num_heads} query heads",
      "mlp": "the MLP",
      "vocab": f"a vocabulary of {config.vocab_size:,}",
    }
    more = _more_per_token(config, mesh, split)
    names = " and ".join(whole[a] for a in whole if a in copied.axes)
    warn(
      f"The {mesh.shape['model']} devices of the axis 'model' of --mesh cannot "
      f"share out {names} evenly: some have the same, so that each takes "
      f"{copied.bytes:,} bytes of weights more{more}."
    )
  return split


def _more_per_token(
  config: DecoderConfig, mesh: jax.sharding.Mesh, split: jax.sharding.Mesh
) -> str:
  """Says what a device takes of keys and values that others have, too."""
  # With "context", a plan's warning says what cannot be shared out.
  if split is mesh or CONTEXT in mesh.shape:
    return ""
  head = 2 * config.num_layers * config.head_dim * jnp.dtype(dtype()).itemsize
  parts = 1 / split.shape["model"] - 1 / mesh.shape["model"]
  more = round(head * config.num_kv_heads * parts)
  return (
    f", and {more:,} per cached token where the cache cannot be in pages, as "
    "when it evicts while decoding"
  )


def _kernels(
  text: str,
) -> tuple[kernels.Implementation | None, dict[str, kernels.Implementation]]:
  """Parses --kernels: what computes all operations, and some of them."""
  if text in ("auto", "xla"):
    return ("xla" if text == "xla" else None), {}
  overrides: dict[str, kernels.Implementation] = {}
  for part in text.split(","):
    name, _, program = part.strip().partition(":")
    if name not in kernels.OPERATIONS or program != "xla":
      raise InputError(
        f"--kernels is auto, xla, or a list such as select:xla,gather:xla of "
        f"{', '.join(kernels.OPERATIONS)}; {part[:60]!r} does not fit."
      )
    overrides[name] = "xla"
  return None, overrides


def check_blocks(block: int | None) -> None:
  """Rejects prompts in blocks where devices share out whole ones.

  It needs no devices, so that it comes before a model is loaded.

  Args:
    block: tokens of a block, as --block says.

  Raises:
    InputError: --block is given, and --mesh has an axis "context"; or --mesh is
      no mesh.
  """
  if block is None or _MESH.value is None:
    return
  devices = parse_sizes(_MESH.value)[CONTEXT]
  if devices > 1:
    raise InputError(
      f"--block={block} reads prompts in blocks, and --mesh={_MESH.value} "
      "shares out the tokens of whole prompts; leave out --block, or give the "
      f"{devices} devices of 'context' to 'data' or 'model'."
    )


def check_batch() -> None:
  """Rejects a batch that every device would compute as a whole.

  Raises:
    InputError: the axis "data" does not divide --batch.
  """
  rows = _data_size()
  if BATCH.value % rows:
    raise InputError(
      f"--batch={BATCH.value} is no multiple of {rows}, the size of the axis "
      "'data' of --mesh, which shares out the rows of a batch; choose another "
      "size of one of them."
    )


def batch() -> int:
  """Returns the contexts per prefill; the default fits the mesh in context."""
  if BATCH.present:
    return int(BATCH.value)
  rows = _data_size()
  return int(-(-BATCH.value // rows) * rows)


def _data_size() -> int:
  """Size of the axis "data" of the mesh in context."""
  return int(jax.sharding.get_abstract_mesh().shape.get("data", 1))


def check_lengths(lm: models.Pretrained, lengths: Sequence[int]) -> None:
  """Rejects lengths that exceed the model's context.

  Args:
    lm: the model.
    lengths: tokens of prompt and answer, without the chat template.

  Raises:
    InputError: the longest, with the template, is longer than the context.
  """
  limit = lm.model.geometry.max_positions
  template = sum(map(lm.text.count, lm.text.split_chat("")))
  if max(lengths) + template > limit:
    raise InputError(
      f"--length={max(lengths)} and {template} tokens of chat template are "
      f"longer than the context of this model, {limit} tokens."
    )


def check_part_length(lm: models.Pretrained, length: int) -> None:
  """Rejects parts of documents that exceed the model's context.

  Args:
    lm: the model.
    length: tokens of a part, which has no template.

  Raises:
    InputError: they are longer than the context.
  """
  limit = lm.model.geometry.max_positions
  if length > limit:
    raise InputError(
      f"--length={length} is longer than the context of this model, {limit} "
      "tokens."
    )


def source(documents: str) -> dict[str, str]:
  """Returns what identifies a training.

  Args:
    documents: digest of what is learned.
  """
  given = settings()
  return {
    "model": given.model,
    "weights": given.weights,
    "dtype": given.dtype,
    "documents": documents,
  }


def parse_lengths(texts: Sequence[str]) -> list[int]:
  """Parses the values of --length, without repetitions.

  Raises:
    InputError: a value is not a positive integer.
  """
  return parse_numbers("length", texts, "numbers of tokens such as 1024,2048")


def dtype() -> str:
  """Returns the dtype of weights and cache."""
  if _DTYPE.value is not None:
    return str(_DTYPE.value)
  return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def model_directory() -> pathlib.Path:
  """Returns the model's directory, or its GGUF file.

  Raises:
    InputError: a named model is missing and cannot be fetched.
  """
  # Path.resolve() raises an error at a loop of links; loading names it.
  return pathlib.Path(os.path.realpath(catalog.locate(MODEL.value)))


def model_name() -> str:
  """Returns the model's name in tables."""
  return name_of(model_directory())


def name_of(directory: pathlib.Path) -> str:
  """Returns the name of a model by its directory or GGUF file, resolved."""
  if directory == catalog.BUNDLED:
    return "kvjax-ref"
  return hub.cached_name(directory, "models") or directory.name
