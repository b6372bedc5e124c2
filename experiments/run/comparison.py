"""Runs every candidate on every sample that has no answer yet."""

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterator, Sequence

from kvjax.experiments.metrics import passkey, registry
from kvjax.experiments.run import hosts
from kvjax.experiments.run.answering import Reply, Seconds, replies
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.memory import rows_that_fit
from kvjax.experiments.run.prompting import (
  QUERY_AGNOSTIC,
  QUERY_AWARE,
  QUERY_AWARE_KVPRESS,
  Prompt,
  Prompted,
  Protocol,
  Shape,
  check_context_length,
)
from kvjax.experiments.run.results import (
  Answer,
  Key,
  Part,
  Results,
  Samples,
  decode,
  encode,
)
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.pretrained import Pretrained
from kvjax.models.tokenizer import Tokenizer

# Called with the task and the number of new answers.
OnAnswers = Callable[[str, int], None]

# Metadata of samples that metrics need.
_SCORED_BY = ("needle", "all_classes", "words")

# Contexts share a padded length if the shortest has this share of the longest's
# tokens, or at most this many fewer.
_SIMILAR = 0.75
_SIMILAR_TOKENS = 256


def compare(
  lm: Pretrained,
  candidates: Sequence[Candidate],
  samples: Samples,
  results: Results,
  batch: int,
  on_answers: OnAnswers,
  protocol: Protocol = QUERY_AGNOSTIC,
  seconds: Seconds | None = None,
) -> None:
  """Generates the answers that `results` lacks and adds them.

  Samples of one part that have the same context are prefilled once.

  Args:
    lm: the model.
    candidates: methods and budgets.
    samples: samples of each task and length, in the order of their numbers;
      those with the same context have the same `max_new_tokens`.
    results: previous answers; new ones are written as they come.
    batch: contexts per prefill, or fewer if their caches do not fit in memory.
    on_answers: called on progress.
    protocol: whether the question is known before compression.
    seconds: the elapsed time is added to it.

  Raises:
    InputError: a sample is longer than the model's context, or the answers
      cannot be written.
  """
  missing = set(wanted(candidates, samples)) - results.answers.keys()
  unfinished = {(key.method, key.budget) for key in missing}
  candidates = [c for c in candidates if (c.method, c.budget) in unfinished]
  contexts = list(_contexts(lm, samples, protocol))
  check_context_length(
    lm, [prompt for c in contexts for prompt in _join_turns(c.prompts)]
  )
  unanswered = {(key.part, key.asked) for key in missing}
  spent = Seconds() if seconds is None else seconds
  if contexts:
    longest = max(prompt.total for c in contexts for prompt in c.prompts)
    fitting = rows_that_fit(lm, candidates, longest, batch)
    # Hosts, whose memory may differ, must have the same batches.
    batch = min(map(int, hosts.gather(str(fitting).encode())))

  def answer(batch: tuple[Shape, list[_Context]]) -> Iterator[list[Answer]]:
    shape, rows = batch
    prompts = [context.prompts for context in rows]
    for group in replies(lm, candidates, prompts, shape, spent):
      yield [_answer(rows[reply.row], reply, lm.text) for reply in group]

  batches = list(_batches(contexts, unanswered, batch, protocol))
  for answers in hosts.share(batches, answer, encode, decode):
    # Equal samples are one.
    new = {each.key: each for each in answers if each.key in missing}
    missing -= new.keys()
    results.add(list(new.values()))
    on_answers(answers[0].task, len(new))


def wanted(candidates: Sequence[Candidate], samples: Samples) -> list[Key]:
  """Lists the keys of a comparison: every sample of every candidate."""
  keys = (
    Key(
      part, sample.digest, candidate.method, candidate.options, candidate.budget
    )
    for candidate in candidates
    for part, drawn in samples.items()
    for sample in drawn
  )
  return list(dict.fromkeys(keys))


@dataclasses.dataclass(frozen=True)
class _Context:
  """Samples that share a context.

  Attributes:
    part: the part of the samples.
    numbers: numbers of the samples.
    samples: the samples.
    prompts: their prompts.
  """

  part: Part
  numbers: Sequence[int]
  samples: Sequence[Sample]
  prompts: Sequence[Prompt]

  def of_samples(self, asked: Container[tuple[Part, str]]) -> "_Context":
    """Leaves out samples that are not asked, unless they stay in the cache."""
    chosen = [
      index
      for index, sample in enumerate(self.samples)
      if (self.part, sample.digest) in asked
    ]
    if chosen and self.prompts[0].stays:
      return self
    return _Context(
      self.part,
      [self.numbers[index] for index in chosen],
      [self.samples[index] for index in chosen],
      [self.prompts[index] for index in chosen],
    )


def _contexts(
  lm: Pretrained, samples: Samples, protocol: Protocol
) -> Iterator[_Context]:
  for part, drawn in samples.items():
    groups: dict[object, list[int]] = {}
    prompted = [_as_prompted(sample, protocol) for sample in drawn]
    for number, sample in enumerate(prompted):
      key = number if protocol == QUERY_AWARE else sample.context
      groups.setdefault(key, []).append(number)
    for numbers in groups.values():
      prompts = [Prompt.of_sample(lm.text, prompted[n]) for n in numbers]
      yield _Context(part, numbers, [drawn[n] for n in numbers], prompts)


def _as_prompted(sample: Sample, protocol: Protocol) -> Sample:
  """Moves the question into the context, if kvpress compresses it there."""
  if protocol == QUERY_AWARE_KVPRESS:
    return sample.with_question_in_context()
  return sample


def _join_turns(prompts: Prompted) -> Prompted:
  """Joins turns that stay in the cache, which must fit the context together."""
  first = prompts[0]
  if not first.stays:
    return prompts
  question = [token for prompt in prompts for token in prompt.question]
  answers = sum(prompt.max_new_tokens for prompt in prompts)
  return [Prompt(first.context, question, answers)]


def _batches(
  contexts: Sequence[_Context],
  unanswered: set[tuple[Part, str]],
  batch: int,
  protocol: Protocol,
) -> Iterator[tuple[Shape, list[_Context]]]:
  """Batches contexts of one part and similar length, with their padded shape.

  Shapes depend on all contexts, including answered ones, so that a resumed run
  reuses its compiled programs.
  """
  shapes: dict[int, Shape] = {}
  # Nothing may follow a context that ends with its question.
  asked = [context for context in contexts if context.prompts[0].question]
  ended = [context for context in contexts if not context.prompts[0].question]
  for similar in itertools.chain(_by_length(asked), _by_length(ended)):
    parts = [context.part for context in similar]
    rows = min(batch, max(parts.count(part) for part in set(parts)))
    prompts = [prompt for context in similar for prompt in context.prompts]
    shape = Shape.of(prompts, rows, protocol)
    shapes |= {id(context): shape for context in similar}
  groups: dict[object, tuple[Shape, list[_Context]]] = {}
  for context in contexts:
    shape = shapes[id(context)]
    context = context.of_samples(unanswered)
    if context.samples:
      most = max(prompt.max_new_tokens for prompt in context.prompts)
      sampling = context.prompts[0].sampling
      key = (context.part, shape, most, sampling)
      groups.setdefault(key, (shape, []))[1].append(context)
  for shape, group in groups.values():
    for start in range(0, len(group), shape.rows):
      yield shape, group[start : start + shape.rows]


def _by_length(contexts: Sequence[_Context]) -> Iterator[list[_Context]]:
  """Groups contexts that share a padded length, the longest first."""

  def tokens(context: _Context) -> int:
    return len(context.prompts[0].context)

  left = sorted(contexts, key=tokens, reverse=True)
  while left:
    longest = tokens(left[0])
    least = min(_SIMILAR * longest, longest - _SIMILAR_TOKENS)
    yield [context for context in left if tokens(context) >= least]
    left = [context for context in left if tokens(context) < least]


def _answer(context: _Context, reply: Reply, tokenizer: Tokenizer) -> Answer:
  sample = context.samples[reply.turn]
  is_cut = len(reply.tokens) >= sample.max_new_tokens
  scores = registry.score(sample, reply.text, is_cut)
  key_token = context.prompts[reply.turn].key_token
  if key_token is not None:
    first = passkey.first_nonblank_token(tokenizer, reply.tokens)
    scores["first_key_token"] = float(first == key_token)
  return Answer(
    task=context.part.task,
    length=context.part.length,
    sample=context.numbers[reply.turn],
    asked=sample.digest,
    method=reply.candidate.method,
    options=reply.candidate.options,
    budget=reply.candidate.budget,
    retention=reply.retention,
    context_tokens=reply.context_tokens,
    kept_tokens=reply.kept_tokens,
    read_tokens=reply.read_tokens,
    cache_bytes=reply.cache_bytes,
    host_bytes=reply.host_bytes,
    global_tokens=reply.global_tokens,
    question=sample.question,
    answer_prefix=sample.answer_prefix,
    answers=list(sample.answers),
    prediction=reply.text,
    first_token=reply.tokens[0] if reply.tokens else None,
    depth=sample.metadata.get("depth"),
    turn=sample.metadata.get("turn"),
    draw=sample.draw,
    first_draw=None if sample.draw is None else sample.first_draw,
    answer_tokens=len(reply.tokens),
    decoding_bytes=reply.decoding_bytes,
    scores={name: 100 * share for name, share in scores.items()},
    scored_by={
      name: sample.metadata[name]
      for name in _SCORED_BY
      if name in sample.metadata
    },
  )
