"""Locates the assistant's answers in the text that a chat template writes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llamajax.data.chat.chat_template import ChatTemplate, Rendered
from llamajax.data.chat.left_out import Words
from llamajax.data.documents.messages import Message, content_of
from llamajax.errors import DataError

_OPENED = re.compile(r"<think>\s*$")
TRAINING_DATE = "2024-07-26"
"""Date for templates that write today's date into training conversations; fixed, so that the data stay the same."""

_MARK_IT = (
    "put {% generation %} and {% endgeneration %} around it, or name a file of configs/chat_templates as data.chat_template"
)
_BEGIN_IT = "add it there too, by a thought or chat_template_kwargs if it supports these, or name another template"


class Answer(NamedTuple):
    """An assistant turn that is trained on."""

    after: Rendered
    """The conversation up to the end of the answer."""
    begin: int
    """Where the answer begins in that text."""
    end: int | None = None
    """Where the answer ends in that text; None if `{% generation %}` blocks mark it."""
    before_next: str | None = None
    """The text up to where the next answer begins, if there is a next answer."""

    def spans_in(self, rendered: Rendered) -> list[tuple[int, int]]:
        """Returns the (start, end) of each stretch of the answer in a text that begins with the text of `after`."""
        if self.end is not None:
            return [(self.begin, self.end)]
        known = self.before_next or ""
        until = max(len(self.after.text), len(known) if rendered.text.startswith(known) else 0)
        return [(start, end) for start, end in rendered.marks if self.begin < end <= until]


def find_answers(
    template: ChatTemplate,
    messages: Sequence[Message],
    turns: Sequence[int],
    variables: dict[str, Any],
    thoughts: Mapping[int, str],
) -> tuple[Rendered, list[Answer]]:
    """Returns the conversation as text, and its turns that are trained on.

    Args:
        template: the chat template.
        messages: the messages.
        turns: indices of the messages that are trained on.
        variables: variables of the template, such as `tools`.
        thoughts: thoughts, by the index of their message, that the generation prompt opens and the template does not write.

    Raises:
        DataError: the template refuses the messages, or the answers cannot be located.
    """
    found = _marked_answers(template, messages, turns, variables) if template.has_generation_blocks else None
    return found or _answers(template, messages, turns, variables, thoughts)


def spans_before_prompt(
    template: ChatTemplate, messages: Sequence[Message], variables: dict[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Returns the messages with a generation prompt, and the places of the answers in it if all can be located.

    Raises:
        DataError: the template refuses the messages.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    whole, *others = _render(template, messages, [(len(messages), True), *_prefixes(turns)], variables, date=None)
    spans: list[tuple[int, int] | None] = [*whole.marks]
    if not whole.marks:
        for turn, (before, prompt, after) in zip(turns, _in_threes(others), strict=True):
            spans.append(_span(before, prompt, after, messages[turn]) if whole.text.startswith(after) else None)
    return whole.text, [] if None in spans else [span for span in spans if span]


def _render(
    template: ChatTemplate,
    messages: Sequence[Message],
    renders: Sequence[tuple[int, bool]],
    variables: dict[str, Any],
    date: str | None = TRAINING_DATE,
) -> list[Rendered]:
    try:
        return list(template.render_prefixes(messages, renders, date, variables))
    except DataError as error:
        reason = str(error).rpartition(";")[0]
        is_asked = all(_asks(messages[:count]) for count, _ in renders)
        if not is_asked and _is_taken(template, messages, variables):
            first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
            blocks = "" if template.has_generation_blocks else ", or name a template with {% generation %} blocks"
            remedy = f"messages[{first}] answers nothing: put a question before it{blocks}"
            raise DataError(f"{reason}; {remedy}") from error
        if len(messages) > 1 and messages[0]["role"] == "system" and _is_taken(template, messages[1:], variables):
            remedy = "it accepts no system message: put that into the first question, or name a template that accepts one"
            raise DataError(f"{reason}; {remedy}") from error
        raise


def _asks(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "user" for message in messages)


def _is_taken(template: ChatTemplate, messages: Sequence[Message], variables: dict[str, Any]) -> bool:
    try:
        next(template.render_prefixes(messages, [(len(messages), False)], TRAINING_DATE, variables))
    except DataError:
        return False
    return True


def _marked_answers(
    template: ChatTemplate, messages: Sequence[Message], turns: Sequence[int], variables: dict[str, Any]
) -> tuple[Rendered, list[Answer]] | None:
    """Returns what `_answers` does, using generation blocks; None if the template writes none in this conversation.

    The number of a message's blocks may depend on what follows it. So the blocks of an answer are those after its own
    generation prompt, in the text that begins with that prompt.
    """
    whole, *until = _render(template, messages, [(len(messages), False), *((turn + 1, False) for turn in turns)], variables)
    if not whole.marks:
        return None
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = _prompts(template, messages, answers, variables)
    found = []
    for turn, after in zip(turns, until, strict=True):
        prompt = prompts.get(turn)
        following = prompts.get(next((answer for answer in answers if answer > turn), -1))
        if prompt is not None and after.text.startswith(prompt):
            found.append(Answer(after, len(prompt), before_next=following))
            continue
        begin = 0 if turn == answers[0] else _first_block(template, messages[: turn + 1], after, variables)
        if prompt is not None:
            before = _render(template, messages, [(turn, False)], variables)[0].text
            began = prompt[_num_common(before, prompt) :]
            first = next((start for start, end in after.marks if end > begin), len(after.text))
            if began not in after.text[max(0, first - len(began)) : first + len(began)]:
                raise _begins_otherwise(template, began)
        found.append(Answer(after, begin, before_next=following))
    return whole, found


def _prompts(
    template: ChatTemplate, messages: Sequence[Message], answers: Sequence[int], variables: dict[str, Any]
) -> dict[int, str]:
    """Returns the generation prompt before each answer that follows a question; empty if the template cannot write them."""
    asked = [answer for answer in answers if _asks(messages[:answer])]
    if not asked:
        return {}
    try:
        served = list(template.render_prefixes(messages, [(answer, True) for answer in asked], TRAINING_DATE, variables))
    except DataError:
        return {}
    return {answer: prompt.text for answer, prompt in zip(asked, served, strict=True)}


def _first_block(template: ChatTemplate, messages: Sequence[Message], after: Rendered, variables: dict[str, Any]) -> int:
    """Returns where the blocks of the last message, an answer, begin; found by marker words in the messages before it.

    Args:
        template: the chat template.
        messages: the messages up to the answer.
        after: the text that the template writes for them.
        variables: variables of the template, such as `tools`.
    """
    answer = len(messages) - 1
    rendered, words = _with_words(template, messages, answer, variables)
    last, of = max(((rendered.text.rfind(word), index) for word, index in words.messages.items()), default=(-1, 0))
    behind = [index for index, (start, _) in enumerate(rendered.marks) if start > last]
    is_told = last >= 0 and len(rendered.marks) == len(after.marks)
    if messages[of]["role"] == "assistant":  # it may have another block after its last word
        rendered, words = _with_words(template, messages, answer + 1, variables)
        own = [word for word, index in words.messages.items() if index == answer]
        holding = [index for index, (a, b) in enumerate(rendered.marks) if any(word in rendered.text[a:b] for word in own)]
        is_told = is_told and holding[:1] == behind[:1]
    if not is_told:
        what = f"which {{% generation %}} blocks belong to messages[{answer}] and which to messages before it is unclear"
        raise cannot_tell(template, what, "name another template")
    return after.marks[behind[0]][0] if behind else len(after.text)


def _with_words(
    template: ChatTemplate, messages: Sequence[Message], count: int, variables: dict[str, Any]
) -> tuple[Rendered, Words]:
    """Returns the rendered conversation with marker words in its first `count` messages, and these words."""
    words = Words(keeps_text=True)
    marked, _ = words.put_into(messages[:count], {})
    (rendered,) = _render(template, [*marked, *messages[count:]], [(len(messages), False)], variables)
    return rendered, words


def _answers(
    template: ChatTemplate,
    messages: Sequence[Message],
    turns: Sequence[int],
    variables: dict[str, Any],
    thoughts: Mapping[int, str],
) -> tuple[Rendered, list[Answer]]:
    """Returns the conversation as text and the turns that are trained on, located by comparing renders."""
    begun = _begun(template) if turns[:1] == [0] else ""
    later = turns[1:] if begun else turns
    first = [(1, False)] if begun else []
    renders = [(len(messages), False), *first, *_prefixes(later)]
    whole, *others = _render(template, messages, renders, variables)
    texts = _in_threes(others[len(first) :])
    if begun:
        after = others[0].text
        before = after[: max(0, after.find(begun))]
        texts = [(before, before + begun, after), *texts]
    found = []
    for turn, (before, prompt, after) in zip(turns, texts, strict=True):
        after = _with_thought(prompt, after, thoughts.get(turn))
        span = _span(before, prompt, after, messages[turn])
        if span is None and (rest := _rest(template, messages[: turn + 1], before, prompt, after, variables)):
            after = prompt + rest
            span = _span(before, prompt, after, messages[turn])
        if span is None:
            if prompt != before and prompt.startswith(before) and after.startswith(before):
                raise _begins_otherwise(template, prompt[len(before) :])
            raise cannot_tell(template, "the assistant's messages cannot be found in its output", _MARK_IT)
        found.append(Answer(Rendered(after, []), *span))
    return whole, found


def _begun(template: ChatTemplate) -> str:
    """Returns what the generation prompt adds to a question; it begins an answer that follows no question, too."""
    question: list[Message] = [{"role": "user", "content": template.in_its_form("Is it?")}]
    try:
        before, prompt = (one.text for one in template.render_prefixes(question, [(1, False), (1, True)], TRAINING_DATE))
    except DataError:
        return ""
    return prompt.removeprefix(before) if prompt.startswith(before) else ""


def _rest(
    template: ChatTemplate, messages: Sequence[Message], before: str, prompt: str, after: str, variables: dict[str, Any]
) -> str | None:
    """Returns the last message, an answer, without its generation prompt, where the answer changes the text before it.

    The text that a conversation has in common with one of another answer ends within the answer, behind that prompt.

    Args:
        template: the chat template.
        messages: the messages up to the answer.
        before: the text without the answer.
        prompt: the text without the answer, with a generation prompt.
        after: the text with the answer.
        variables: variables of the template, such as `tools`.
    """
    began = prompt.removeprefix(before) if prompt.startswith(before) else ""
    if not began:
        return None
    (other,), _ = Words(keeps_text=False).put_into(messages[-1:], {})
    try:
        (rendered,) = template.render_prefixes([*messages[:-1], other], [(len(messages), False)], TRAINING_DATE, variables)
    except DataError:
        return None
    at = after[: _num_common(after, rendered.text)].rfind(began)
    return after[at + len(began) :] if at >= 0 else None


def _num_common(one: str, other: str) -> int:
    """Returns the number of leading characters that two texts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _with_thought(prompt: str, after: str, thought: str | None) -> str:
    """Returns the text with an answer as a model writes it whose generation prompt opens a thought: the thought, closed, and
    what the template writes of the answer."""
    opened = _OPENED.search(prompt) if thought else None
    if opened is None or after.startswith(prompt) or not after.startswith(prompt[: opened.start()]):
        return after
    return f"{prompt}{thought}\n</think>\n\n{after[opened.start() :].lstrip()}"


def _begins_otherwise(template: ChatTemplate, began: str) -> DataError:
    what = f"begins an answer with {began[-40:]!r} in its generation prompt, but not before the answer itself"
    return cannot_tell(template, what, _BEGIN_IT)


def cannot_tell(template: ChatTemplate, what: str, remedy: str) -> DataError:
    """Returns the error for a template whose answers cannot be located."""
    return DataError(f"{template.where}: chat template: {what}; {remedy}")


def _prefixes(turns: Sequence[int]) -> list[tuple[int, bool]]:
    """Returns the three renders that locate each turn: up to it, up to it with a generation prompt, and with it."""
    return [render for turn in turns for render in ((turn, False), (turn, True), (turn + 1, False))]


def _in_threes(rendered: Sequence[Rendered]) -> list[tuple[str, str, str]]:
    texts = [one.text for one in rendered]
    return list(zip(texts[::3], texts[1::3], texts[2::3], strict=True))


def _span(before: str, prompt: str, after: str, message: Message) -> tuple[int, int] | None:
    """Returns the (start, end) of an assistant's turn in a text, or None if it cannot be located.

    Args:
        before: the text without the turn.
        prompt: the text without the turn, with a generation prompt.
        after: the text with the turn.
        message: the turn.
    """
    content = content_of(message).strip()
    said = after[len(prompt) :]
    is_prompted = prompt != before or said.lstrip().startswith(content)  # Llama 2 has no generation prompt and needs none
    if not (after.startswith(prompt) and is_prompted):
        return None
    # White space after the mark that ends a turn is not trained on: in use, generation has stopped by then.
    stripped = said.rstrip()
    has_end_mark = not (content and stripped.endswith(content))
    return len(prompt), len(prompt) + len(stripped if has_end_mark else said)
