"""Parses the text of a program that XLA has compiled."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping

# The first line of a computation, and a line of an instruction.
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%(?P<name>\S+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_ELSEWHERE = re.compile(r"S\((\d+)\)")
_VMEM = "1"
_KERNEL = re.compile(
  r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*|__cudnn\$fmha\w*)"'
)

# Instructions that run other computations, and the attributes with their names.
CALLS = {
  "while": ("condition", "body"),
  "conditional": (
    "branch_computations",
    "true_computation",
    "false_computation",
  ),
  "call": ("to_apply",),
}


@dataclasses.dataclass(frozen=True)
class Buffer:
  """An array.

  Attributes:
    shape: the sizes of its axes.
    nbytes: bytes without padding.
    space: memory space: 0 device memory, 1 VMEM, 5 host memory.
  """

  shape: tuple[int, ...]
  nbytes: int
  space: int

  @property
  def hbm(self) -> int:
    """Its bytes if it is in device memory, else 0."""
    return 0 if self.space else self.nbytes


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: name without the leading %.
    opcode: such as `fusion`.
    results: one array, or those of a tuple in order.
    operands: names of instructions; for a parameter, its number.
    attributes: the rest of the line.
    root: whether it is the result of the computation.
  """

  name: str
  opcode: str
  results: tuple[Buffer, ...]
  operands: tuple[str, ...]
  attributes: str
  root: bool

  @property
  def is_kernel(self) -> bool:
    """Whether it runs a Pallas kernel, or cuDNN's attention."""
    return _KERNEL.search(self.attributes) is not None

  @property
  def is_on_host(self) -> bool:
    """Whether the host runs it or what it starts."""
    return 'async_execution_thread="host"' in self.attributes

  @property
  def is_free(self) -> bool:
    """Whether it only concatenates adjacent buffers."""
    return 'custom_call_target="ConcatBitcast"' in self.attributes

  @property
  def kernel(self) -> str:
    """The kernel's name."""
    return self.name.partition(".")[0]

  @property
  def vmem(self) -> int:
    """Bytes of VMEM allocated to it."""
    match = re.search(
      r'"used_scoped_memory_configs":(\[[^\]]*\])', self.attributes
    )
    scoped = json.loads(match[1]) if match else []
    return sum(int(x["size"]) for x in scoped if x["memory_space"] == _VMEM)

  def called(self, kind: str) -> list[str]:
    """Returns names of the computations of an attribute."""
    match = re.search(rf"\b{kind}=(\{{[^}}]*\}}|%\S+)", self.attributes)
    return re.findall(r"%([^\s,{}]+)", match[1]) if match else []


# Instructions by name, in the order of the text.
Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
  """A program.

  Attributes:
    computations: computations by name.
    entry: name of the entry computation.
  """

  computations: Mapping[str, Computation]
  entry: str

  @classmethod
  def of(cls, text: str) -> "Module":
    """Parses the output of `jax.stages.Compiled.as_text`."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
      if head := _COMPUTATION.match(line):
        instructions = computations.setdefault(head["name"], {})
        entry = head["name"] if head["entry"] else entry
      elif match := _INSTRUCTION.match(line):
        instructions[match["name"]] = _instruction(
          match["name"], match["rest"], bool(match["root"])
        )
    return cls(computations, entry)

  def __iter__(self) -> Iterator[Instruction]:
    for computation in self.computations.values():
      yield from computation.values()


def _instruction(name: str, text: str, root: bool) -> Instruction:
  """Parses `shape opcode(operands), attributes`."""
  if text.startswith("("):
    shape, text = _bracketed(text)
  else:
    shape, _, text = text.partition(" ")
  opcode, _, _ = text.strip().partition("(")
  operands, attributes = _bracketed(text[text.index("(") :])
  return Instruction(
    name,
    opcode,
    tuple(map(_buffer, _ARRAY.findall(_COMMENT.sub("", shape)))),
    tuple(re.findall(r"[^\s,()%]+", _COMMENT.sub("", operands))),
    attributes,
    root,
  )


def _bracketed(text: str) -> tuple[str, str]:
  """Splits after the bracket that matches the first one."""
  depth = 0
  for place in re.finditer(r"[()]", text):
    depth += 1 if place[0] == "(" else -1
    if depth == 0:
      return text[: place.end()], text[place.end() :]
  raise ValueError(f"Brackets do not close in {text[:80]!r}.")


def _buffer(match: tuple[str, str, str]) -> Buffer:
  dtype, sizes, layout = match
  shape = tuple(int(size) for size in sizes.split(",") if size)
  bits = re.search(r"\d+", dtype)  # `pred` has no digits
  space = _ELSEWHERE.search(layout)
  return Buffer(
    shape,
    math.prod(shape) * (int(bits[0]) if bits else 8) // 8,
    int(space[1]) if space else 0,
  )
