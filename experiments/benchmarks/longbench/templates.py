"""LongBench's prompts (`config/dataset2prompt.json`), split for compression.

The wording is the benchmark's, including "asconcisely", which kvpress and the
papers on KV caches use as well. Context, question and start of the answer
together are the official prompt. They are split as in kvpress
(`longbench/create_huggingface_dataset.py`).
"""

from typing import NamedTuple

from kvjax.errors import InputError
from kvjax.models.tokenizer import Tokenizer


class PromptTexts(NamedTuple):
  """The texts of a prompt, or their templates with {context} and {input}.

  Attributes:
    context: the part that can be compressed before the question is known.
    question: the rest of the question.
    answer_prefix: start of the answer.
  """

  context: str
  question: str
  answer_prefix: str

  @property
  def full(self) -> str:
    """The official prompt."""
    return "".join(self)


_STORY = (
  "asconcisely as you can, using a single phrase if possible. Do not provide "
  "any explanation.\n\n"
)
_ARTICLE = (
  "as concisely as you can, using a single phrase or sentence if possible. If "
  "the question cannot be answered based on the information in the article, "
  'write "unanswerable". If the question is a yes/no question, answer "yes", '
  '"no", or "unanswerable". Do not provide any explanation.\n\n'
)
_PASSAGES = (
  "Answer the question based on the given passages. Only give me the answer "
  "and do not output any other words.\n\n"
)
_MULTI_HOP = PromptTexts(
  f"{_PASSAGES}The following are given passages.\n{{context}}\n\n{_PASSAGES}",
  "Question: {input}\n",
  "Answer:",
)
_CODE = "Please complete the code given below. \n{context}"
_NEXT_LINE = "Next line of code:\n"

PROMPTS = {
  "narrativeqa": PromptTexts(
    "You are given a story, which can be either a novel or a movie script, "
    f"and a question. Answer the question {_STORY}"
    "Story: {context}\n\n"
    f"Now, answer the question based on the story {_STORY}",
    "Question: {input}\n\n",
    "Answer:",
  ),
  "qasper": PromptTexts(
    "You are given a scientific article and a question. "
    f"Answer the question {_ARTICLE}"
    "Article: {context}\n\n"
    f" Answer the question based on the above article {_ARTICLE}",
    "Question: {input}\n\n",
    "Answer:",
  ),
  "multifieldqa_en": PromptTexts(
    "Read the following text and answer briefly.\n\n"
    "{context}\n\n"
    "Now, answer the following question based on the above text, only give me "
    "the answer and do not output any other words.\n\n",
    "Question: {input}\n",
    "Answer:",
  ),
  "multifieldqa_zh": PromptTexts(
    "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
    "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。"
    "\n\n",
    "问题：{input}\n",
    "回答：",
  ),
  "hotpotqa": _MULTI_HOP,
  "2wikimqa": _MULTI_HOP,
  "musique": _MULTI_HOP,
  "dureader": PromptTexts(
    "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n"
    "请基于上述文章回答下面的问题。\n\n",
    "问题：{input}\n",
    "回答：",
  ),
  "gov_report": PromptTexts(
    "You are given a report by a government agency. Write a one-page summary "
    "of the report.\n\nReport:\n{context}\n\n",
    "Now, write a one-page summary of the report.\n\n",
    "Summary:",
  ),
  "qmsum": PromptTexts(
    "You are given a meeting transcript and a query containing a question or "
    "instruction. Answer the query in one or more sentences.\n\n"
    "Transcript:\n{context}\n\n"
    "Now, answer the query based on the above meeting transcript in one or "
    "more sentences.\n\n",
    "Query: {input}\n",
    "Answer:",
  ),
  "multi_news": PromptTexts(
    "You are given several news passages. Write a one-page summary of all "
    "news. \n\nNews:\n{context}\n\n",
    "Now, write a one-page summary of all the news.\n\n",
    "Summary:",
  ),
  "vcsum": PromptTexts(
    "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n"
    "会议记录：\n{context}\n\n",
    "",
    "会议总结：",
  ),
  "trec": PromptTexts(
    "Please determine the type of the question below. Here are some examples "
    "of questions.\n\n{context}\n",
    "{input}",
    "Type:",
  ),
  "triviaqa": PromptTexts(
    "Answer the question based on the given passage. Only give me the answer "
    "and do not output any other words. The following are some examples.\n\n"
    "{context}\n\n",
    "{input}",
    "Answer:",
  ),
  "samsum": PromptTexts(
    "Summarize the dialogue into a few short sentences. The following are "
    "some examples.\n\n{context}\n\n",
    "{input}",
    "Summary:",
  ),
  "lsht": PromptTexts(
    "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n", "{input}", ""
  ),
  "passage_count": PromptTexts(
    "There are some paragraphs below sourced from Wikipedia. Some of them may "
    "be duplicates. Please carefully read these paragraphs and determine how "
    "many unique paragraphs there are after removing duplicates. In other "
    "words, how many non-repeating paragraphs are there in total?\n\n"
    "{context}\n\n",
    "Please enter the final count of unique paragraphs after removing "
    "duplicates. The output format should only contain the number, such as 1, "
    "2, 3, and so on.\n\n",
    "The final answer is: ",
  ),
  "passage_retrieval_en": PromptTexts(
    "Here are 30 paragraphs from Wikipedia, along with an abstract. Please "
    "determine which paragraph the abstract is from.\n\n"
    "{context}\n\nThe following is an abstract.\n\n",
    "{input}\n\nPlease enter the number of the paragraph that the abstract is "
    'from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.'
    "\n\n",
    "The answer is: ",
  ),
  "passage_retrieval_zh": PromptTexts(
    "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。"
    "\n\n{context}\n\n下面是一个摘要\n\n",
    "{input}\n\n请输入摘要所属段落的编号。"
    '答案格式必须是"段落1"，"段落2"等格式\n\n',
    "答案是：",
  ),
  "lcc": PromptTexts(_CODE, "", _NEXT_LINE),
  "repobench-p": PromptTexts(_CODE, "{input}", _NEXT_LINE),
}

# In these datasets the input ends with the start of the answer.
_ENDS_WITH_PREFIX = ("trec", "triviaqa", "samsum")


def fill(name: str, context: str, text: str) -> PromptTexts:
  """Builds the prompt of a row of a dataset.

  Args:
    name: name of the dataset, without `_e`.
    context: the row's context.
    text: the row's input.
  """
  template = PROMPTS[name]
  prompt = PromptTexts(
    template.context.format(context=context),
    template.question.format(input=text),
    template.answer_prefix,
  )
  if name not in _ENDS_WITH_PREFIX:
    return prompt
  question, label, rest = text.rpartition(prompt.answer_prefix)
  if not label or rest.strip():
    return prompt._replace(answer_prefix="")
  return prompt._replace(question=question, answer_prefix=label + rest)


def truncate(
  prompt: PromptTexts, limit: int, tokenizer: Tokenizer
) -> PromptTexts:
  """Cuts out the middle of a prompt that is longer than `limit` tokens.

  As in LongBench (`pred.py`), the first and last `limit // 2` tokens of the
  full prompt are decoded and the two texts joined. The parts of the result
  always join to that text. Question and start of the answer are at the end, so
  they remain complete unless they exceed half the limit; then the question
  loses its middle or beginning, as in LongBench. Special tokens do not count.

  Raises:
    InputError: half the limit is too short for the start of the answer.
  """
  ids = tokenizer.encode(prompt.full)
  if len(ids) <= limit:
    return prompt
  half = limit // 2
  head = tokenizer.decode(ids[:half])
  tail = tokenizer.decode(ids[len(ids) - half :])
  context, question, prefix = prompt
  # A tokenizer may normalize its input.
  ending = tokenizer.decode(tokenizer.encode(question + prefix))
  if tail.endswith(ending):
    return PromptTexts(head + tail.removesuffix(ending), question, prefix)
  if not tail.endswith(prefix):
    raise InputError(
      f"A limit of {limit} tokens is too short for a prompt of LongBench; "
      "1000 and more are usual."
    )
  cut_question = head[len(context) :] + tail.removesuffix(prefix)
  return PromptTexts(head[: len(context)], cut_question, prefix)
