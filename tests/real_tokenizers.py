"""Tokenizers that others made, from packages of the extra `test`: Mistral's, Llama 3's and Qwen 2's.

Mistral's packages have its SentencePiece models as they are. Of the others there are the vocabularies, in the form that
tiktoken reads; they are written as the `tokenizer.json` that is published with the models.
"""

import base64
import functools
import importlib.util
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

MISTRAL_VERSIONS = ("v1", "v2", "v3", "v7")
"""v1 has the three special pieces of Llama 2; v2 also has control pieces as `[INST]`, v3 those of tools, v7 that of the
system's message."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _WORDS % r"\p{N}{1,3}"
QWEN2_PATTERN = _WORDS % r"\p{N}"

LLAMA3_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
    "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
)  # fmt: skip
"""Ids from 128000 on."""
QWEN2_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids from 151643 on."""
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen's template without its default system message."""


def mistral(version: str) -> Path:
    """The SentencePiece model of one of `MISTRAL_VERSIONS`, under the name that its package has for it."""
    (path,) = _folder("mistral_common", "data").glob(f"*.model.{version}")
    return path


def llama3(directory: Path) -> Path:
    """`directory/tokenizer.json` of Llama 3, which begins texts by its post-processor; with a `tokenizer_config.json`."""
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "clean_up_tokenization_spaces": True,
              "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    return _write(directory, _llama3_json(), config)


def qwen2(directory: Path) -> Path:
    """`directory/tokenizer.json` of Qwen 2, which has no token that begins a text; with a `tokenizer_config.json`."""
    config = {"add_prefix_space": False, "bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
              "unk_token": None, "chat_template": CHATML, "tokenizer_class": "Qwen2Tokenizer"}  # fmt: skip
    return _write(directory, _qwen2_json(), config)


def llama3_ranks() -> dict[bytes, int]:
    return _read_ranks(_folder("llama_models", "llama3", "api") / "tokenizer.model")


def qwen2_ranks() -> dict[bytes, int]:
    return _read_ranks(_folder("dashscope", "resources") / "qwen.tiktoken")


@functools.cache
def _llama3_json() -> str:
    """As published: with every way to join two tokens into a third."""
    ranks = llama3_ranks()
    tokenizer = _byte_level(ranks, _all_merges(ranks), LLAMA3_PATTERN, LLAMA3_SPECIAL, ignore_merges=True)
    begin = LLAMA3_SPECIAL[0]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, len(ranks))]
            ),
        ]
    )
    return tokenizer.to_str()


@functools.cache
def _qwen2_json() -> str:
    """As published: with the one way to join by which each token was learnt."""
    ranks = qwen2_ranks()
    merges = [parts for token, rank in ranks.items() if len(parts := _join(ranks, token, rank)) == 2]
    tokenizer = _byte_level(ranks, merges, QWEN2_PATTERN, QWEN2_SPECIAL, ignore_merges=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer.to_str()


def _byte_level(
    ranks: dict[bytes, int], merges: Iterable[Sequence[bytes]], pattern: str, special: Sequence[str], *, ignore_merges: bool
) -> tokenizers.Tokenizer:
    alphabet = bytes_to_unicode()
    name = {token: "".join(map(alphabet.__getitem__, token)) for token in ranks}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {name[token]: rank for token, rank in ranks.items()},
            [(name[left], name[right]) for left, right in merges],
            ignore_merges=ignore_merges,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    assert tokenizer.token_to_id(special[0]) == len(ranks)
    return tokenizer


def _all_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    return [
        (token[:at], token[at:])
        for token in ranks
        for at in sorted(range(1, len(token)), key=lambda at, token=token: (ranks.get(token[:at], -1), at))
        if token[:at] in ranks and token[at:] in ranks
    ]


def _join(ranks: dict[bytes, int], token: bytes, below: int) -> list[bytes]:
    """The bytes of `token` joined by all tokens of a rank less than `below`."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, below) for left, right in itertools.pairwise(parts)]
        best = min(joined)
        if best == below:
            break
        at = joined.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _read_ranks(path: Path) -> dict[bytes, int]:
    lines = map(str.split, path.read_text().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _write(directory: Path, tokenizer: str, config: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    path = directory / "tokenizer.json"
    path.write_text(tokenizer)
    return path


def _folder(package: str, *names: str) -> Path:
    """A folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed; it is in the extra `test`"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]).joinpath(*names)
