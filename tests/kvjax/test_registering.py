"""Names under which methods are registered."""

import dataclasses

import jax.numpy as jnp
import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.methods import HeadwiseMethod
from kvjax.methods.rerotated import Rerotated
from kvjax.retrieval import Flat
from kvjax.testing import TinyModel, check_method


@dataclasses.dataclass(frozen=True)
class Norm(HeadwiseMethod):
  def score_head(self, head):
    return -jnp.sum(head.keys**2, axis=-1)


@pytest.mark.parametrize(
  ("name", "make", "message"),
  [
    ("snapkv", Norm, "'snapkv' already; register yours under another"),
    ("flat", Norm, "'flat' already"),
    ("My-Norm", Norm, "lower-case letters"),
    ("a_number", lambda: 3, "3 under 'a_number' is not"),
    ("a_number", lambda: int("x"), "cannot be made with its defaults: invalid"),
    ("ada", Norm, "written before a method's name, as in ada/keydiff"),
    ("rerotate", Flat, "written before a method's name"),
  ],
)
def test_names_that_cannot_be_registered(registry, name, make, message):
  with pytest.raises(kvjax.InputError, match=message):
    kvjax.register(name, make)
  with pytest.raises(kvjax.InputError, match="There is no method"):
    kvjax.get_plan("a_number", kvjax.Tokens(9))


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("preset", ["My-Preset", 3])
def test_presets_whose_names_cannot_be_written(registry, preset):
  with pytest.raises(InputError, match=f"preset's name .* {preset!r} does not"):
    kvjax.register("norm", Norm, presets={preset: Norm()})


def test_a_cell_that_registers_may_run_again(registry):
  def cell(power):
    @dataclasses.dataclass(frozen=True)
    class Again(Norm):
      exponent: int = power

    kvjax.register("again", Again)

  cell(1)
  cell(2)
  assert kvjax.get_method("again").exponent == 2
  with pytest.raises(InputError, match="'again' already"):
    kvjax.register("again", Norm)


def test_fields_are_those_of_a_dataclass(registry):
  class Plain(Norm):
    power: int = 2

  with pytest.raises(InputError, match=r"Plain has fields .* before the class"):
    kvjax.register("plain", Plain)


class Hidden(Norm):
  def __init__(self, power=2.0):
    object.__setattr__(self, "power", power)


@dataclasses.dataclass(frozen=True)
class Listed(Norm):
  powers: list[float] = dataclasses.field(default_factory=lambda: [1.0])


@dataclasses.dataclass(frozen=True)
class Uncompared(Norm):
  power: float = dataclasses.field(default=1.0, compare=False)


@dataclasses.dataclass(frozen=True)
class Halved(Norm):
  """What it derives from its fields is no other value."""

  power: float = 1.0

  def __post_init__(self):
    object.__setattr__(self, "_half", self.power / 2)


@pytest.mark.parametrize(
  ("made", "said"),
  [
    (Uncompared, "The field 'power' of Uncompared is left out of comparisons"),
    (lambda: Rerotated(Hidden()), "Hidden holds 'power', which is no field"),
    (Hidden, "Hidden holds 'power', which is no field, so that its values"),
    (Listed, "The field 'powers' of Listed is a list, which has no hash"),
  ],
)
def test_values_that_programs_cannot_tell_apart(registry, made, said):
  for use in (
    lambda: kvjax.register("mine", made),
    lambda: kvjax.Plan(made(), 8),
    lambda: check_method(made()),
  ):
    with pytest.raises(InputError, match=said):
      use()


def test_traits_of_another_type_are_refused_by_name_too(registry):
  @dataclasses.dataclass(frozen=True)
  class Mapped(Norm):
    @property
    def traits(self):
      return {"sinks": 4}

  kvjax.register("mapped", Mapped)
  with pytest.raises(InputError, match=r"The traits of Mapped must be .*Trait"):
    kvjax.get_plan("mapped", 8)


def test_what_follows_from_fields_may_be_kept():
  assert kvjax.Plan(Halved(3.0), 8).method._half == 1.5


def test_an_index_that_programs_cannot_tell_apart():
  class Deep(Flat):
    def __init__(self, depth=2):
      super().__init__()
      object.__setattr__(self, "depth", depth)

  with pytest.raises(InputError, match="Deep holds 'depth', which is no field"):
    kvjax.SparseAttention(Deep(), 8)


def test_a_method_that_is_not_registered_is_told_so():
  said = r"class Norm cannot .* as after kvjax.register\(\"mine\", Norm\)"
  with pytest.raises(InputError, match=said):
    check_method(Norm())


def test_a_preset_of_another_class_is_saved_too(registry, tmp_path):
  @dataclasses.dataclass(frozen=True)
  class Loud(Norm):
    pass

  kvjax.register("quiet", Norm, presets={"loud": Loud()})
  model = TinyModel()
  prompts = kvjax.Prompts.of([list(range(24))])
  plan = kvjax.get_plan(
    "quiet.loud", kvjax.Tokens(8), schedule=kvjax.Schedule(every=4)
  )
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  kvjax.save_cache(cache, tmp_path / "a", model=model, model_id="tiny")
  loaded = kvjax.load_cache(tmp_path / "a", model=model, model_id="tiny")
  assert loaded.plan == plan
