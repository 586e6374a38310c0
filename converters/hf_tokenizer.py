"""A tokenizer's files as transformers and llama.cpp read them with the ids of training."""

import json
import re
from collections.abc import Mapping
from typing import Any

from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (protobuf makes it at run time)
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HuggingFace

from llamajax.data.tokenizers.tokenizer_base import SPACE, Tokenizer
from llamajax.data.tokenizers.tokenizer_files import JSON_FILE, MODEL_FILE, TokenizerFiles, parse_files

_KINDS = ModelProto.SentencePiece


def tokenizer_files(files: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files that stand beside or replace a tokenizer's, so that every reader has the ids of training.

    transformers reads `tokenizer.json` as `tokenizer_config.json` says, llama.cpp the scores in `tokenizer.model` if there
    is one. A SentencePiece model of a kind that has no such form gets none.

    Args:
        files: name and content; among them `tokenizer.json` or `tokenizer.model`.
        tokenizer: the same, as training used it.
    """
    known = json.loads(files.get("tokenizer_config.json", '{"clean_up_tokenization_spaces": false}'))
    config = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, **known}
    body = files.get(JSON_FILE)
    if body is None:
        beside = parse_files(tokenizer.source, files)
        bos_id = tokenizer.prefix[0] if tokenizer.prefix else None
        body = convert_sentencepiece(files[MODEL_FILE], bos_id, beside)
        if body is None:
            return {}
        config |= beside.values
        if beside.added:  # llama.cpp numbers none by itself
            config["added_tokens_decoder"] = {str(entry.pop("id")): entry for entry in json.loads(body)["added_tokens"]}
    model = json.loads(body)["model"]
    if model.get("unk_token") is not None:
        config.setdefault("unk_token", model["unk_token"])
    # Classes of Llama, and no class, let transformers 5 put together a normalizer and pre-tokenizer of its own.
    if JSON_FILE not in files or "Llama" in (config.get("tokenizer_class") or "Llama"):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if model.get("byte_fallback") and not _puts_space_first(body):
        config.setdefault("add_prefix_space", False)  # llama.cpp would put one before every prompt
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return {JSON_FILE: body} | ({} if config == known else {"tokenizer_config.json": text.encode()})


def convert_sentencepiece(model_file: bytes, bos_id: int | None, beside: TokenizerFiles | None = None) -> bytes | None:
    """The `tokenizer.json` of a SentencePiece model, with the same ids for every text.

    Args:
        model_file: content of `tokenizer.model`.
        bos_id: what a text is begun with; None: nothing.
        beside: what the files beside it say: tokens that are added to it, and whether only the beginning of a text is
            begun with a space, if it has none, or also what follows on special and added tokens.

    Returns:
        None for a kind of model that Hugging Face has no form for: that is no BPE, or puts the space behind a word.
    """
    model = ModelProto.FromString(model_file)
    training, rules = model.trainer_spec, model.normalizer_spec
    if training.model_type != training.BPE or training.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        return None
    defined = [piece.piece for piece in model.pieces if piece.type == _KINDS.USER_DEFINED]
    tokenizer = HuggingFace(_bpe(model, whole_words=bool(defined)))
    prefixes_once = rules.add_dummy_prefix and beside is not None and beside.values.get("legacy") is False
    tokenizer.normalizer = normalizers.Sequence(_normalizers(rules, prefixes=rules.add_dummy_prefix and not prefixes_once))
    steps = []
    if prefixes_once:
        steps.append(pre_tokenizers.Metaspace(SPACE, "first", split=False))  # unless the text begins with one
    if defined:
        # SentencePiece finds these first, the longest first, and puts its space before a text only, not behind them.
        pattern = "|".join(re.escape(piece.replace(" ", SPACE)) for piece in sorted(defined, key=len, reverse=True))
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    if steps:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = [piece.piece for piece in model.pieces if piece.type in (_KINDS.UNKNOWN, _KINDS.CONTROL)]
    added = {text: AddedToken(text, special=True) for text in special} | {
        new.content: new for _, new in (beside.added if beside is not None else ())
    }
    for token in added.values():
        # Normalized, it would be looked for with what is put before a text.
        flags = {key: getattr(token, key) for key in ("lstrip", "rstrip", "single_word", "special")}
        token = AddedToken(token.content, **flags, normalized=False)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if bos_id is not None:
        bos = tokenizer.id_to_token(bos_id)
        assert bos is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer.to_str().encode()


def _bpe(model: Any, *, whole_words: bool) -> models.BPE:
    ids = {piece.piece: token for token, piece in enumerate(model.pieces)}
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _KINDS.NORMAL}
    # SentencePiece joins the neighbours whose union has the best score, of equals those that are first in the text: runs of
    # spaces, whose scores are equal in Llama 2, grow from the left. Every way to split a piece gets its place.
    merges = sorted(
        ((text[:at], text[at:]) for text in scores for at in range(1, len(text)) if {text[:at], text[at:]} <= scores.keys()),
        key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0])),
    )
    return models.BPE(
        ids,
        merges,
        unk_token=model.pieces[model.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
        ignore_merges=whole_words,
    )


def _normalizers(rules: Any, *, prefixes: bool) -> list[normalizers.Normalizer]:
    """Returns the normalizers that do to a text what SentencePiece does, in its order."""
    found: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        found.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        found += [
            normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if prefixes:
        found.append(normalizers.Prepend(SPACE))
    return [*found, normalizers.Replace(" ", SPACE)]


def _puts_space_first(body: bytes) -> bool:
    first = HuggingFace.from_str(body.decode()).encode("a", add_special_tokens=False).tokens[0]
    return first.startswith(SPACE)
