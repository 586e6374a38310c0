"""The tokenizers that are put together here are those of the vocabularies' own reader."""

import unicodedata

import pytest
import tiktoken
import tokenizers

from tests import real_tokenizers as real
from tests.mixed_texts import TEXTS


@pytest.mark.parametrize(
    ("write", "read_ranks", "pattern", "normalization"),
    [(real.llama3, real.llama3_ranks, real.LLAMA3_PATTERN, None), (real.qwen2, real.qwen2_ranks, real.QWEN2_PATTERN, "NFC")],
    ids=["Llama 3", "Qwen 2"],
)
def test_ids_are_those_of_tiktoken(tmp_path, write, read_ranks, pattern, normalization):
    tokenizer = tokenizers.Tokenizer.from_file(str(write(tmp_path)))
    tokenizer.encode_special_tokens = True
    reference = tiktoken.Encoding("real", pat_str=pattern, mergeable_ranks=read_ranks(), special_tokens={})
    for text in TEXTS:
        as_read = unicodedata.normalize(normalization, text) if normalization else text
        assert tokenizer.encode(text, add_special_tokens=False).ids == reference.encode_ordinary(as_read), text
