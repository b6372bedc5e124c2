"""Plans as tables for terminals and Markdown."""

from collections.abc import Mapping, Sequence

from kvjax.experiments.compilation.engine_programs import Use
from kvjax.experiments.planning.batches import Batches
from kvjax.experiments.planning.bounds import Bound, step_bound
from kvjax.experiments.planning.compiling import Needs, Planned, Sent
from kvjax.experiments.planning.searching import Found
from kvjax.experiments.planning.slices import KINDS, PAGE, Slice
from kvjax.experiments.report import formats, wording
from kvjax.experiments.report.wording import NOTHING, mib


def describe(use: Use) -> str:
  """Says in words what is planned."""
  plan = use.plan
  parts = [
    use.model.name,
    f"{wording.count(use.rows, 'context')} of {use.tokens:,} tokens",
    f"{use.name} at {plan.budget}",
  ]
  if not plan.schedule.is_whole_prompt:
    parts.append(str(plan.schedule))
  if plan.kv_dtype:
    parts.append(plan.kv_dtype)
  return ", ".join(parts)


def facts(planned: Planned, slice_: Slice) -> str:
  """Says in words where it is planned."""
  chip = planned.chip
  axes = ",".join(f"{axis}:{size}" for axis, size in chip.mesh.shape.items())
  return (
    f"{slice_.name}: {wording.count(slice_.chips, 'chip')} ({chip.topology}), "
    f"mesh {axes}, batch {planned.use.rows}, "
    f"{mib(chip.hbm_bytes)} MiB of HBM each"
  )


def to_markdown(
  planned: Planned, slice_: Slice, batches: Batches | None
) -> str:
  """Formats what a plan takes on each device, as a table of Markdown."""
  both = (planned.prefill, planned.decode)
  taken = planned.sizes
  rows: list[tuple[str, Sequence[str]]] = [
    ("weights", [mib(taken.weights)] * 2),
    ("cache", [mib(taken.cache)] * 2),
    ("temporaries", [mib(needs.temporary) for needs in both]),
    ("together", [mib(planned.hbm(needs)) for needs in both]),
    ("% of HBM", [_share(planned, needs) for needs in both]),
    ("copies", [mib(taken.copies)] * 2),
    ("host", [mib(taken.host) if taken.host else NOTHING] * 2),
    ("largest batch", (batches and [f"{most:,}" for most in batches]) or []),
    ("collectives", [_sent(needs.sent) for needs in both]),
    ("at least", [NOTHING, _bound(step_bound(planned, slice_))]),
  ]
  lines = [(name, *cells) for name, cells in rows if cells]
  return formats.grid(("", "prefill", "decoding"), lines).rstrip()


def verdict(planned: Planned, slice_: Slice) -> str:
  """Says in a sentence whether a plan fits."""
  share = f"{100 * planned.most / planned.chip.hbm_bytes:.0f} % of HBM"
  if planned.fits:
    return f"It fits on {slice_.name}, in {share}."
  which = max(
    ("prefill", planned.prefill),
    ("decoding", planned.decode),
    key=lambda each: each[1].temporary,
  )
  if planned.most <= planned.chip.hbm_bytes:
    return (
      f"It does not fit on {slice_.name}: the compiler refuses it, although "
      f"{which[0]} seems to take {share}."
    )
  return f"It does not fit on {slice_.name}: {which[0]} takes {share}."


def finding(found: Found) -> str:
  """Names the smallest slice and its largest batch in a sentence."""
  asked, most = found.asked.use.rows, found.most.use.rows
  share = f"{100 * found.most.most / found.most.chip.hbm_bytes:.0f} % of HBM"
  return (
    f"The smallest slice of {found.slice.kind} for a batch of {asked} is "
    f"{found.slice.name}; its largest batch is {most}, in {share}."
  )


def sources(kinds: Sequence[str]) -> str:
  """Names the pages of the bandwidths between chips."""
  return "Bandwidths between chips: " + ", ".join(
    f"{KINDS[kind].link_bytes_per_second / 1e9:,.0f} GB/s of {kind} "
    f"({PAGE}{kind})"
    for kind in dict.fromkeys(kinds)
  )


def _bound(bound: Bound) -> str:
  memory, products, links = (_seconds(seconds) for seconds in bound)
  return (
    f"{_seconds(bound.seconds)} a step (HBM {memory}, products {products}, "
    f"links {links})"
  )


def _seconds(seconds: float) -> str:
  if seconds >= 1e-3:
    return f"{1e3 * seconds:,.1f} ms"
  return f"{1e6 * seconds:,.0f} µs"


def _sent(sent: Mapping[str, Sent]) -> str:
  parts = [
    f"{each.times:,} {opcode} of {mib(each.nbytes)}"
    for opcode, each in sorted(sent.items())
  ]
  return ", ".join(parts) or NOTHING


def _share(planned: Planned, needs: Needs) -> str:
  return f"{100 * planned.hbm(needs) / planned.chip.hbm_bytes:.1f}"
