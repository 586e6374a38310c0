"""Settings for records of conversations, preferences and prompts: form, names of fields and roles, and what is learned."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from llamajax.config.rules import Section

ChatFormat = Literal["messages", "sharegpt", "alpaca", "prompt_completion"]
TrainOn = Literal["all", "last", "none-of-prompt"]
Role = Literal["system", "user", "assistant", "tool", "function_call"]

KNOWN_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "tool": "tool", "ipython": "tool", "observation": "tool",
    "function": "tool", "tool_response": "tool", "function_call": "function_call", "tool_call": "function_call",
}  # fmt: skip
"""Roles by the names that published data use."""
_FIELDS_OF_FORMATS: dict[ChatFormat, tuple[str, ...]] = {
    "messages": ("messages",), "sharegpt": ("messages",), "alpaca": ("instruction", "input", "output", "history"),
    "prompt_completion": ("prompt", "completion"),
}  # fmt: skip
_FIELDS_OF_PREFERENCES = ("chosen", "rejected", "label")
_FIELDS_OF_MESSAGES = ("role", "content", "reasoning", "tool_calls", "train")
_FIELDS_OF_TOKENS = ("input_ids", "labels", "attention_mask")


@dataclass(frozen=True, kw_only=True)
class FieldNames(Section):
    """Names of a record's fields where they differ from those of its format; `a.b`: the field b inside a."""

    messages: str | None = None
    """`messages`, `sharegpt`, `preference`, `prompt`: list of messages. Unset: `messages`, or `conversations` for sharegpt;
    either for `preference` and `prompt`."""
    role: str | None = None
    """Role of a message. Unset: `role` or `from`."""
    content: str | None = None
    """Text of a message. Unset: `content` or `value`."""
    reasoning: str | None = None
    """Thoughts before an answer. Unset: `reasoning_content`, `thinking` or `reasoning`."""
    tool_calls: str | None = None
    """Tool calls of a message. Unset: `tool_calls`."""
    train: str | None = None
    """Field of a message that is 1 or true where it is learned, 0 or false where it is not. Unset: `train`, `weight` and the
    other marks that have one meaning."""
    system: str | None = None
    """System message of a record. Unset: `system`."""
    tools: str | None = None
    """Tools of a record: a list, or a JSON text of one. Unset: `tools` or `functions`."""
    instruction: str | None = None
    """`alpaca`, `preference`, `prompt`: question. Unset: `instruction`."""
    input: str | None = None
    """`alpaca`, `preference`, `prompt`: text below the question. Unset: `input`."""
    output: str | None = None
    """`alpaca`, `preference`: answer. Unset: `output`."""
    history: str | None = None
    """`alpaca`, `preference`, `prompt`: earlier questions and answers. Unset: `history`."""
    prompt: str | None = None
    """`prompt_completion`, `preference`, `prompt`: question, a text or messages. Unset: `prompt`."""
    completion: str | None = None
    """`prompt_completion`, `preference`: answer, a text or messages. Unset: `completion`."""
    chosen: str | None = None
    """`preference`: the better answer, a text or messages, or the whole conversation with it. Unset: `chosen`."""
    rejected: str | None = None
    """`preference`: the worse answer, in the form of the better one. Unset: `rejected`."""
    label: str | None = None
    """`preference`: whether the record's only answer is desirable, true or false. Unset: `label` or `kto_tag`."""
    input_ids: str | None = None
    """`tokenized`: token ids. Unset: `input_ids`."""
    labels: str | None = None
    """`tokenized`: the token ids that are learned, -100 elsewhere, aligned with the ids. Unset: `labels`."""
    attention_mask: str | None = None
    """`tokenized`: 0 for padding. Unset: `attention_mask`."""

    def broken_rules(self) -> Iterator[str]:
        for name, own in self.given.items():
            if not own:
                yield f"{name}: must not be empty; remove it to use the format's own name"
        seen: dict[tuple[bool, str], str] = {}
        for name, own in self.given.items():
            first = seen.setdefault((name in _FIELDS_OF_MESSAGES, own), name)
            if own and first != name:
                yield f"{name}: {own} is also the name of {first}; give each field its own"

    @property
    def given(self) -> dict[str, str]:
        """Names that are set."""
        values = ((own.name, getattr(self, own.name)) for own in dataclasses.fields(self))
        return {name: value for name, value in values if value is not None}


@dataclass(frozen=True, kw_only=True)
class RoleNames(Section):
    """Further names of roles, beside the usual ones such as human, gpt and observation."""

    system: tuple[str, ...] = ()
    """Names for instructions before the conversation."""
    user: tuple[str, ...] = ()
    """Names for the person who asks."""
    assistant: tuple[str, ...] = ()
    """Names for the side whose messages are learned."""
    tool: tuple[str, ...] = ()
    """Names for results of tools."""
    function_call: tuple[str, ...] = ()
    """Names for messages of the assistant that hold tool calls as JSON."""

    def broken_rules(self) -> Iterator[str]:
        seen: dict[str, str] = {}
        for role, name in self._pairs:
            if seen.setdefault(name, role) != role:
                yield f"{role}: {name} is also a name of {seen[name]}; keep one of them"

    @property
    def _pairs(self) -> list[tuple[Role, str]]:
        roles: tuple[Role, ...] = ("system", "user", "assistant", "tool", "function_call")
        return [(role, name) for role in roles for name in getattr(self, role)]

    @property
    def roles(self) -> dict[str, Role]:
        """Roles by all of their names; a name that this source gives counts first."""
        own: dict[str, Role] = {name: role for role, name in self._pairs}
        return KNOWN_ROLES | own


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """How a source writes conversations, and which of their messages are learned unless a mark says otherwise."""

    chat_format: ChatFormat = "messages"
    fields: FieldNames = field(default_factory=FieldNames)
    roles: RoleNames = field(default_factory=RoleNames)
    train_on: TrainOn | None = None

    @property
    def learned(self) -> TrainOn:
        """Which of the assistant's messages are learned."""
        return self.train_on or ("none-of-prompt" if self.chat_format == "prompt_completion" else "all")

    @property
    def key(self) -> Any:
        """JSON value that identifies the form."""
        if self == ChatForm(chat_format=self.chat_format):
            return self.chat_format
        key = dataclasses.asdict(self)
        for name in _FIELDS_OF_PREFERENCES:  # younger than the caches of other kinds, which must stay valid
            if key["fields"][name] is None:
                del key["fields"][name]
        return key

    def broken_rules(self, kind: str) -> Iterator[str]:
        """Yields one `key: rule; remedy` line for every setting that has no effect in a source of this kind."""
        if kind == "chat":
            read = (*_FIELDS_OF_FORMATS[self.chat_format], *_FIELDS_OF_MESSAGES, "system", "tools")
            what, remedy = f"chat_format={self.chat_format}", "set another chat_format, or remove it"
        elif kind == "preference":
            answers = ("messages", "instruction", "input", "output", "history", "prompt", "completion")
            read = (*answers, *_FIELDS_OF_PREFERENCES, *_FIELDS_OF_MESSAGES, "system", "tools")
            what, remedy = f"kind={kind}", "remove it"
        elif kind == "prompt":
            read = ("messages", "instruction", "input", "history", "prompt", *_FIELDS_OF_MESSAGES, "system", "tools")
            what, remedy = f"kind={kind}", "remove it"
        else:
            read, what = _FIELDS_OF_TOKENS if kind == "tokenized" else (), f"kind={kind}"
            remedy = "set kind: chat, or remove it"
        for name in self.fields.given:
            if name not in read:
                yield f"fields.{name}: {self.fields.given[name]} has no effect with {what}; {remedy}"
        others = {
            "chat_format": self.chat_format if self.chat_format != "messages" else None,
            "roles": self.roles if self.roles != RoleNames() else None,
            "train_on": self.train_on,
        }
        for name, value in others.items():
            is_read = kind == "chat" or (kind in ("preference", "prompt") and name == "roles")
            if not is_read and value is not None:
                told = f"{value} " if isinstance(value, str) else ""
                yield f"{name}: {told}has no effect with kind={kind}; use kind=chat, or remove {name}"
        if kind == "chat" and self.train_on == "none-of-prompt" and self.chat_format != "prompt_completion":
            yield (
                f"train_on: none-of-prompt needs records of prompt and completion, not chat_format={self.chat_format};"
                " set all or last"
            )
