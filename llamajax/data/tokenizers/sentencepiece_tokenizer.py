"""Tokenizers from SentencePiece models."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from jaxtyping import Int32
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (protobuf makes it at run time)
from tokenizers import AddedToken

from llamajax.data.tokenizers.tokenizer_base import SPACE, Tokenizer, neighbours, num_threads, text_bytes
from llamajax.data.tokenizers.tokenizer_files import MODEL_FILE, TokenizerFiles
from llamajax.errors import DataError

if TYPE_CHECKING:
    import gigatoken


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, with the added tokens that its neighbouring files list.

    The character U+2581, which SentencePiece writes for a space, is read as a space, as transformers and llama.cpp read it.
    Added tokens are cut out first, and the text between them is encoded as separate texts, each of which may get a leading
    space. If `legacy` is false in the configuration, only the first text gets one, and none that already has one, as in
    transformers.
    """

    library = "sentencepiece"

    def __init__(self, files: TokenizerFiles) -> None:
        super().__init__(files)
        kinds = ModelProto.SentencePiece
        try:
            model = ModelProto.FromString(files.contents[MODEL_FILE])
            added = {piece.piece: AddedToken(piece.piece, special=True) for piece in model.pieces
                     if piece.type in (kinds.CONTROL, kinds.UNKNOWN)}  # fmt: skip
            ids = {piece.piece: token for token, piece in enumerate(model.pieces)}
            num_pieces = len(model.pieces)
            for token, new in files.added:
                if new.content not in ids and not (token is None and new.content in files.ends.values()):
                    ids[new.content] = len(model.pieces)
                    model.pieces.add(piece=new.content, type=kinds.CONTROL if new.special else kinds.USER_DEFINED)
            self.new_tokens = tuple(text for text in ids if ids[text] >= num_pieces)
            self._processor = sentencepiece.SentencePieceProcessor()
            self._processor.LoadFromSerializedProto(model.SerializeToString())
        except (DecodeError, RuntimeError) as error:
            raise DataError(
                f"{files.source}: data.tokenizer.path: is not a SentencePiece model; if it came with Llama 3 or later,"
                " use the tokenizer.json of the Hugging Face release"
            ) from error
        self._check_added(ids.get)
        self.vocab_size = self._processor.get_piece_size()
        named_bos, named_eos = (self._named_end(key, ids.get) for key in ("bos_token", "eos_token"))
        own_bos, own_eos = (token if token >= 0 else None for token in (self._processor.bos_id(), self._processor.eos_id()))
        bos_id, eos_id = (own if named is None else named for named, own in ((named_bos, own_bos), (named_eos, own_eos)))
        self._set_ends(bos_id, eos_id, "use a model with a bos or eos piece")
        self.bos_token, self.eos_token = (
            None if token is None or key in files.denied else self._processor.id_to_piece(token)
            for key, token in (("bos_token", bos_id), ("eos_token", eos_id))
        )
        has_prefix = self.bos_token is not None and files.values.get("add_bos_token") is not False
        self.prefix = (self.bos_id,) if has_prefix else ()
        byte_counts = {kinds.BYTE: lambda _: 1, kinds.NORMAL: text_bytes, kinds.USER_DEFINED: text_bytes}
        self.token_bytes = np.array(
            [byte_counts[piece.type](piece.piece) if piece.type in byte_counts else 0 for piece in model.pieces], np.int32
        )
        added |= {new.content: new for _, new in files.added}
        others = {piece.piece for piece in model.pieces if piece.type != kinds.NORMAL}
        self.special_texts = tuple(sorted(added.keys() | others))
        self._in_templates = _Cutter(added.values(), ids)
        self._in_texts = _Cutter((new for new in added.values() if not new.special), ids)
        # Other kinds (unigram) choose the segmentation with the best total score, so a cut can change distant tokens.
        is_local = model.trainer_spec.model_type == model.trainer_spec.BPE and model.trainer_spec.byte_fallback
        self._joined = neighbours(ids) if is_local and not model.normalizer_spec.precompiled_charsmap else None
        self._prefixes_once = files.values.get("legacy") is False
        self._strips_text = model.normalizer_spec.remove_extra_whitespaces
        with_prefix, self._has_prefix = model.SerializeToString(), model.normalizer_spec.add_dummy_prefix
        model.normalizer_spec.add_dummy_prefix = False
        self._models = with_prefix, model.SerializeToString()
        self._without_prefix = sentencepiece.SentencePieceProcessor(model_proto=self._models[1])

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        return self._encode([self._cut([text], self._in_texts)[0] for text in texts])

    def encode_following(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        return self._encode([self._cut([text], self._in_texts, after_text=True)[0] for text in texts])

    def splits(self, text: str, place: int) -> bool:
        """Checks that no piece has the two characters side by side, so that no piece can cross the place."""
        return self._joined is not None and text[place - 1 : place + 1].replace(" ", SPACE) not in self._joined

    def _load_fast(self, without_prefix: bool) -> "gigatoken.Tokenizer":
        import gigatoken  # takes memory; only needed for much text

        return gigatoken.Tokenizer.from_sentencepiece(self._models[without_prefix])

    def encode_template_parts(self, parts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """Encodes control pieces such as `</s>` as their tokens, as user-defined pieces are in any text."""
        return self._encode(self._cut(parts, self._in_templates))

    def _cut(
        self, parts: Sequence[str], cutter: "_Cutter", *, after_text: bool = False
    ) -> list[list["int | tuple[bool, str]"]]:
        """Returns each part's sections: the id of an added token, or a text and whether it follows another."""
        found = []
        for part in parts:
            sections: list[int | tuple[bool, str]] = []
            for section in cutter.cut(part):
                if isinstance(section, int):
                    sections.append(section)
                    after_text = self._prefixes_once
                else:
                    sections.append((self._is_next(section, after_text), section))
                    after_text = True
            found.append(sections)
        return found

    def _is_next(self, text: str, follows: bool) -> bool:
        if not self._has_prefix:
            return False
        # A processor that strips the leading space of a text and adds it again must do the same here.
        has_space = text.startswith((" ", SPACE))
        return (self._prefixes_once and has_space) or (follows and not (self._strips_text and has_space))

    def _encode(self, parts: Sequence[Sequence["int | tuple[bool, str]"]]) -> list[np.ndarray]:
        """Returns the ids of each part's sections, encoding all texts at once."""
        texts = [section for part in parts for section in part if not isinstance(section, int)]
        encoded = {}
        for follows, processor in ((False, self._processor), (True, self._without_prefix)):
            some = [text for is_next, text in texts if is_next == follows]
            encoded[follows] = iter(processor.encode(some, return_type="numpy", num_threads=num_threads()))
        ids = [[np.array([s], np.int32) if isinstance(s, int) else next(encoded[s[0]]) for s in part] for part in parts]
        return [of_part[0] if len(of_part) == 1 else np.concatenate([np.zeros(0, np.int32), *of_part]) for of_part in ids]

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(token) for token in ids])

    def name(self, token: int) -> str:
        return self._processor.id_to_piece(int(token))


class _Cutter:
    """Finds added tokens in a text; among those that begin at one place, the longest."""

    def __init__(self, tokens: Iterable[AddedToken], ids: Mapping[str, int]) -> None:
        longest_first = sorted(tokens, key=lambda token: len(token.content), reverse=True)
        self._ids = [ids[token.content] for token in longest_first]
        # A lookahead for their first characters comes first: Mistral has 770 tokens, and each is a group.
        begins = {re.escape(token.content[:1]) for token in longest_first}
        begins |= {r"\s" for token in longest_first if token.lstrip}
        any_of = f"(?=[{''.join(sorted(begins))}])(?:{'|'.join(map(_pattern, longest_first))})"
        self._pattern = re.compile(any_of if longest_first else "(?!)")

    def cut(self, text: str) -> Iterator[int | str]:
        """Yields the ids of tokens and the non-empty texts between them."""
        at = 0
        for match in self._pattern.finditer(text):
            if match.start() > at:
                yield text[at : match.start()]
            assert match.lastindex is not None
            yield self._ids[match.lastindex - 1]
            at = match.end()
        if at < len(text):
            yield text[at:]


def _pattern(token: AddedToken) -> str:
    """Returns one group for the token, with the white space that it absorbs."""
    word = rf"(?<!\w){re.escape(token.content)}(?!\w)" if token.single_word else re.escape(token.content)
    return "(" + r"\s*" * token.lstrip + word + r"\s*" * token.rstrip + ")"
