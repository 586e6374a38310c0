"""Encodes prompts to token ids, with their records beside them."""

import json

import numpy as np

from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.chat.chat_tokens import encode_messages
from llamajax.data.documents.prompts import PromptRecord
from llamajax.data.documents.token_records import Encoded
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import DataError

BYTES = 2**8
"""Exclusive upper limit of the ids that stand for bytes of records."""


def encode_prompt(template: ChatTemplate | None, tokenizer: Tokenizer, prompt: PromptRecord) -> list[Encoded]:
    """Returns two sequences: the tokens of the prompt, up to where the model continues, and the bytes of a JSON list, which
    has the prompt as a text or as messages, and its record.

    The cache stores both like the two answers of a preference, so each byte takes the place of an id. These ids are no
    tokens: they may reach `BYTES` where a vocabulary is smaller. Nothing of either sequence is trained on.

    Raises:
        DataError: see `encode_messages`; or the prompt has messages, and there is no template.
    """
    if prompt.conversation is None:
        ids = np.array(tokenizer.encode_prompt(prompt.text), np.int32)
    elif template is None:
        raise DataError(
            "data.chat_template: is required for prompts of messages, because the tokenizer has none; name a Jinja file, for"
            " example one of configs/chat_templates/"
        )
    else:
        ids = encode_messages(template, tokenizer, prompt.conversation.messages, prompt.conversation.variables)
    said = prompt.text if prompt.conversation is None else prompt.conversation.messages
    beside = b"[%s,%s]" % (json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode(), prompt.record)
    of_bytes = np.frombuffer(beside, np.uint8).astype(np.int32)
    return [Encoded(part, np.zeros(len(part), bool)) for part in (ids, of_bytes)]
