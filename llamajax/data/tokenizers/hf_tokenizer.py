"""Tokenizers from Hugging Face's `tokenizer.json` files."""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, get_args

import numpy as np
import tokenizers
from jaxtyping import Int32

from llamajax.data.tokenizers.fast_encoder import NormalForm
from llamajax.data.tokenizers.split_patterns import may_span
from llamajax.data.tokenizers.tokenizer_base import SPACE, Tokenizer, neighbours, text_bytes
from llamajax.data.tokenizers.tokenizer_files import JSON_FILE, TokenizerFiles
from llamajax.errors import DataError, show

if TYPE_CHECKING:
    import gigatoken

KNOWN_BOS = ("<s>", "<|begin_of_text|>", "<|endoftext|>")
KNOWN_EOS = ("</s>", "<|end_of_text|>", "<|endoftext|>")
"""Special tokens that begin and end a text in tokenizers with no file that names them."""

MAX_IDS = 2**24
"""Exclusive upper limit of token ids: a hundred times the largest vocabularies. The library takes memory for each id."""

_LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"}
"""Normalizers that change only a few neighbouring characters of a text."""
BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of the library's `ByteLevel`, taken from GPT-2."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` with the tokens that its neighbouring files add or mark as special.

    The tokens that begin and end a text are those named by the configuration, else those its post-processor adds, else
    tokens with a known name. Only special tokens count, because Qwen's vocabulary also has an ordinary `<s>`.

    The file's regular expressions run on every text. The library aborts a match after ten million attempts from one place,
    so a malicious file can make encoding slow, but nothing worse.
    """

    library = "tokenizers"

    def __init__(self, files: TokenizerFiles) -> None:
        super().__init__(files)
        with self._working():
            self._load(files)

    def _load(self, files: TokenizerFiles) -> None:
        try:
            text = files.contents[JSON_FILE].decode()
            _check_ids(json.loads(text))
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            model = json.loads(self._tokenizer.to_str())
        except Exception as error:  # the library raises plain exceptions
            reason = str(error).splitlines()[0]
            raise DataError(
                f"{files.source}: data.tokenizer.path: is not a tokenizer.json: {reason}; replace the file"
            ) from error
        self.new_tokens = self._add_tokens()
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.token_bytes = self._count_bytes(vocabulary, model)
        self.prefix, suffix = self._frame()
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        self.special_texts = tuple(sorted(added))
        normalizers, splits = _steps(model["normalizer"], "normalizers"), _steps(model["pre_tokenizer"], "pretokenizers")
        is_bpe = model["model"]["type"] == "BPE" and {step["type"] for step in normalizers} <= _LOCAL
        patterns = [_pattern(step) for step in splits]
        self._patterns = None if not is_bpe or None in patterns else [p for p in patterns if p]
        # As in Llama 2's: spaces are marked with a character, and byte tokens encode what the vocabulary lacks.
        is_whole = is_bpe and model["model"].get("byte_fallback") and {step["type"] for step in splits} <= {"Metaspace"}
        self._joined = neighbours(vocabulary) if is_whole and SPACE in vocabulary else None
        forms = get_args(NormalForm)
        self.normal_form = next((s["type"] for s in normalizers if s["type"] in forms), None)

        def end(key: str, framed: tuple[int, ...], known: tuple[str, ...]) -> int | None:
            named, others = self._named_end(key, vocabulary.get), (vocabulary[name] for name in known if name in added)
            return next((token for token in (named, *framed, *others) if token is not None), None)

        bos_id, eos_id = end("bos_token", self.prefix, KNOWN_BOS), end("eos_token", suffix, KNOWN_EOS)
        self._set_ends(bos_id, eos_id, "put a tokenizer_config.json with bos_token and eos_token beside it")
        # A null in the configuration (as Qwen's) means no token, although documents then begin with another one. Where no
        # file says anything, the token that ends texts does not count as the one that begins them.
        says_bos = "bos_token" in files.ends or self.prefix or bos_id != eos_id
        has_bos = bos_id is not None and says_bos and "bos_token" not in files.denied
        self.bos_token = self._tokenizer.id_to_token(self.bos_id) if has_bos else None
        self.eos_token = None if "eos_token" in files.denied else self._tokenizer.id_to_token(self.eos_id)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        return self._encode_all(self._tokenizer, texts)

    def encode_following(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        return self._encode_all(self._following, texts)

    def _encode_all(self, tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
        with self._working():
            encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def _load_fast(self, without_prefix: bool) -> "gigatoken.Tokenizer":
        import gigatoken  # takes memory; only needed for much text

        return gigatoken.Tokenizer.from_json((self._following if without_prefix else self._tokenizer).to_str())

    def splits(self, text: str, place: int) -> bool:
        """Checks that the pre-tokenizer splits there, with no pattern across; or that no piece has both characters."""
        if self._joined is not None:
            return text[place - 1 : place + 1].replace(" ", SPACE) not in self._joined
        splitter, normalizer = self._tokenizer.pre_tokenizer, self._tokenizer.normalizer
        if not self._patterns or (normalizer and normalizer.normalize_str(text) != text):
            return False
        if any(may_span(pattern, *text[place - 1 : place + 1]) for pattern in self._patterns):
            return False
        return any(start == place for _, (start, _) in splitter.pre_tokenize_str(text))

    def _is_next(self, text: str, follows: bool) -> bool:
        return follows and self._following is not self._tokenizer

    def encode_template_parts(self, parts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        with self._working():
            return self._encode_parts(parts)

    def _encode_parts(self, parts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        tokenizer, without_prefix, prefixes_sections = self._for_templates
        added = tokenizer.get_added_tokens_decoder()
        after_text = False
        encoded = []
        for part in parts:
            encoding = (without_prefix if after_text else tokenizer).encode(part, add_special_tokens=False)
            ids = encoding.ids
            first_added = next((index for index, token in enumerate(ids) if token in added), None)
            if after_text and prefixes_sections and first_added is not None:
                rest = part[encoding.offsets[first_added][0] :]
                ids = ids[:first_added] + tokenizer.encode(rest, add_special_tokens=False).ids
            if ids:
                after_text = not prefixes_sections or ids[-1] not in added
            encoded.append(np.array(ids, np.int32))
        return encoded

    @functools.cached_property
    def _for_templates(self) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer, bool]:
        """Three values for chat templates.

        A tokenizer that reads special tokens in a text, a second one that adds no prefix, and whether the first one adds its
        prefix to the text after every special token.
        """
        model = json.loads(self._tokenizer.to_str())
        is_first_only = any(
            step.get("prepend_scheme") == "first" for step in _steps(model["pre_tokenizer"], "pretokenizers")
        )
        first, following = (tokenizers.Tokenizer.from_str(text.to_str()) for text in (self._tokenizer, self._following))
        return first, following, not is_first_only

    @functools.cached_property
    def _following(self) -> tokenizers.Tokenizer:
        """The tokenizer without its prefix before a text."""
        text = self._tokenizer.to_str()
        model = json.loads(text)
        normalizers = _steps(model["normalizer"], "normalizers")
        pre_tokenizers = _steps(model["pre_tokenizer"], "pretokenizers")
        for step in normalizers:
            if step["type"] == "Prepend":
                step["prepend"] = ""
        for step in pre_tokenizers:
            if "prepend_scheme" in step:
                step["prepend_scheme"] = "never"
            if "add_prefix_space" in step:
                step["add_prefix_space"] = False
        if model == json.loads(text):
            return self._tokenizer
        following = tokenizers.Tokenizer.from_str(json.dumps(model))
        following.encode_special_tokens = True
        return following

    def decode(self, ids: Iterable[int]) -> str:
        with self._working():
            return self._tokenizer.decode([int(token) for token in ids])

    def name(self, token: int) -> str:
        return self._tokenizer.id_to_token(int(token)) or f"<{token}>"

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Turns panics of the Rust library, which are not `Exception`s, into a `DataError`."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(
                f"{self.source}: data.tokenizer.path: fails: {show(str(error).strip())}; use another tokenizer"
            ) from error

    def _add_tokens(self) -> tuple[str, ...]:
        """Adds the tokens that neighbouring files list, and those they only name if missing; returns the new ones."""
        unknown = [new.content for _, new in self.read_from.added if self._tokenizer.token_to_id(new.content) is None]
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        for token, new in self.read_from.added:
            is_end = new.content in self.read_from.ends.values()
            has_place = self._tokenizer.token_to_id(new.content) is not None or not is_end
            if token is not None or (new.content not in known and has_place):
                self._tokenizer.add_tokens([new])
        self._check_added(self._tokenizer.token_to_id)
        return tuple(unknown)

    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the tokens that the post-processor adds before and after a text."""
        encoding = self._tokenizer.encode("a")
        marked = list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        before, after = (itertools.takewhile(lambda entry: entry[1], some) for some in (marked, reversed(marked)))
        return tuple(token for token, _ in before), tuple(token for token, _ in after)

    def _count_bytes(self, vocabulary: dict[str, int], model: dict) -> np.ndarray:
        decoder = json.dumps(model["decoder"])
        if '"ByteLevel"' in decoder:  # each character of a token's name is one byte
            count = len
        elif any(f'"{kind}"' in decoder for kind in ("ByteFallback", "Metaspace", "Replace")):
            count = text_bytes
        else:
            raise DataError(
                f"{self.source}: data.tokenizer.path: its decoder does not restore text exactly;"
                " use byte-level BPE or a SentencePiece kind of tokenizer"
            )
        counts = np.zeros(self.vocab_size, np.int32)
        for name, token in vocabulary.items():
            is_byte = model["model"].get("byte_fallback") and _BYTE_PIECE.fullmatch(name)
            counts[token] = 1 if is_byte else count(name)
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            counts[token] = 0 if added.special else len(added.content.encode())
        unknown = vocabulary.get(model["model"].get("unk_token"))
        if unknown is not None:
            counts[unknown] = 0
        return counts


def _check_ids(body: object) -> None:
    match body:
        case {"model": {"vocab": dict(vocabulary)}}:  # in a list, the index is the id
            if wrong := [token for token in vocabulary.values() if type(token) is int and token >= MAX_IDS]:
                raise ValueError(f"has the token id {show(str(wrong[0]))}; all must be below {MAX_IDS:,}")


def _pattern(step: dict) -> str | None:
    """Returns the pattern that a pre-tokenizer splits by without loss; empty if it does not split, None if it has none."""
    match step:
        case {"type": "ByteLevel"}:
            return BYTE_LEVEL_PATTERN if step.get("use_regex", True) else ""
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": str(pattern)}}:
            return pattern
    return None


def _steps(step: dict | None, list_key: str) -> list[dict]:
    """Returns a `tokenizer.json`'s normalizers or pre-tokenizers: a single one, or the steps of a sequence."""
    if step is None:
        return []
    return step[list_key] if step["type"] == "Sequence" else [step]
