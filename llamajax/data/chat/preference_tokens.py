"""Encodes preferences to token ids, a sequence for each side."""

import numpy as np

from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.chat.chat_tokens import encode_conversation
from llamajax.data.documents.conversations import Conversation
from llamajax.data.documents.preferences import Preference
from llamajax.data.documents.token_records import Encoded
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import DataError

_NOTHING = Encoded(np.zeros(0, np.int32), np.zeros(0, bool))


def encode_preference(template: ChatTemplate, tokenizer: Tokenizer, preference: Preference) -> list[Encoded]:
    """Returns the chosen sequence and the rejected one, with their answers marked; a side that is missing has no tokens.

    Raises:
        DataError: see `encode_conversation`; or an answer is not one sequence, has no token, or equals the other one.
    """
    chosen, rejected = (
        _NOTHING if side is None else _sequence(template, tokenizer, side)
        for side in (preference.chosen, preference.rejected)
    )
    if np.array_equal(chosen.ids, rejected.ids):
        raise _unusable(template, "writes both answers alike, so neither is better", "remove the line")
    return [chosen, rejected]


def _sequence(template: ChatTemplate, tokenizer: Tokenizer, conversation: Conversation) -> Encoded:
    first, *others = encode_conversation(template, tokenizer, conversation)
    if others:
        what = "changes earlier turns of an answer once it continues, so the answer is not one sequence"
        raise _unusable(template, what, "move all turns but the last into the prompt, or name another template")
    if not first.learnt[1:].any():
        raise _unusable(template, "writes nothing of an answer", "correct or remove the line")
    return first


def _unusable(template: ChatTemplate, what: str, remedy: str) -> DataError:
    return DataError(f"{template.where}: chat template: {what}; {remedy}")
