"""Checks that transformers gives texts the same token ids as training."""

from pathlib import Path

import numpy as np

from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import CheckpointError

_TEXTS = (
    "", " ", "   ", " " * 17, "  both  ends  ", "\n", "\r\n\r\n", "\t\t", "a \n b", " \n\n  x\n",
    "The quick brown fox, doesn't it? I'LL say: \"12 345.67\" — naïve café…",
    "    def f(x: int) -> str:\n\t\treturn f'{x!r:>10}'  # x == 1 && y <= 0xFF\n\n\n",
    "Съешь же ещё этих мягких булок 敏捷的棕色狐狸跳过懒狗。ひらがなカタカナ 다람쥐 नमस्ते १२३ नृत्य สวัสดี שָׁלוֹם السلام",
    "😀👍🏽👩‍👩‍👧‍👦🇩🇪❤️ ½ ﬁ № Å e\u0301 \u01b0\u0303 ∑ → ≠", "\u00a0a\u3000b\u200b\ufeff\u2028\u0085",
    "\0\x01\x1b[31m\x7f\ufffd\U0010ffff", "a\u2581b \u2581", "----====____....!!!!",
    "<s> </s> <unk> <|endoftext|> [INST] <0x0A>",
)  # fmt: skip
_TEXTS_OF_PIECES, _PIECES = 64, 32


def compare_ids(hf_dir: Path, tokenizer: Tokenizer) -> str:
    """Compares transformers' token ids of texts with llamajax's ids of the same texts as prompts.

    The texts cover many scripts and kinds; others are random pieces of the vocabulary. Special tokens written in a text are
    plain text on both sides.

    Args:
        hf_dir: directory with `config.json`.
        tokenizer: the tokenizer of the training.

    Returns:
        A short summary of the comparison.

    Raises:
        CheckpointError: the ids of a text differ, or transformers cannot load the tokenizer.
    """
    import transformers  # takes seconds

    transformers.utils.logging.set_verbosity_error()
    rng = np.random.default_rng(0)
    ids = rng.integers(0, tokenizer.vocab_size, (_TEXTS_OF_PIECES, _PIECES))
    texts = [*_TEXTS, *(tokenizer.decode(row) for row in ids)]
    remedy = "the directory was not kept; --no-verify keeps it, for programs that take token ids"
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(hf_dir, trust_remote_code=False, local_files_only=True)
        empty = [tokenizer.bos_id]  # a prompt has at least one token
        theirs = [ids or empty for ids in loaded(texts, split_special_tokens=True)["input_ids"]]
    except Exception as error:  # it raises errors of any kind
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{hf_dir}: transformers cannot read the tokenizer: {reason}; {remedy}") from error
    ours = [tokenizer.encode_prompt(text) for text in texts]
    if differing := [text for text, one, other in zip(texts, ours, theirs, strict=True) if one != other]:
        raise CheckpointError(
            f"{hf_dir}: transformers gives {len(differing)} of {len(texts)} texts other ids than training, for example"
            f" {differing[0][:40]!r}; {remedy}"
        )
    return f"transformers gives the ids of training for all {len(texts)} texts"
