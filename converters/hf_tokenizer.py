"""A SentencePiece BPE as the `tokenizer.json` that every Hugging Face reader takes."""

import json

import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]
from tokenizers import AddedToken, decoders, models, normalizers, processors


def convert_sentencepiece(model_file: bytes) -> dict[str, bytes] | None:
    """`tokenizer.json` and `tokenizer_config.json` of a SentencePiece model; None if it is of a kind not covered.

    Covered is the BPE that we train: byte fallback, and text taken as it is. A text is begun with the bos token, as
    training does it; ids of texts are those of SentencePiece.
    """
    model = ModelProto.FromString(model_file)
    rules, kinds = model.normalizer_spec, ModelProto.SentencePiece
    keeps_text = rules.name == "identity" and not rules.add_dummy_prefix and not rules.remove_extra_whitespaces
    training = model.trainer_spec
    has_ends = min(training.unk_id, training.bos_id, training.eos_id) >= 0
    if not (keeps_text and has_ends and training.model_type == training.BPE and training.byte_fallback):
        return None
    ids = {piece.piece: token for token, piece in enumerate(model.pieces)}
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == kinds.NORMAL}
    # SentencePiece joins the neighbours whose union has the best score; every way to split a piece gets its place.
    merges = sorted(
        ((text[:at], text[at:]) for text in scores for at in range(1, len(text)) if {text[:at], text[at:]} <= scores.keys()),
        key=lambda pair: (-scores[pair[0] + pair[1]], ids[pair[0]], ids[pair[1]]),
    )
    unknown, bos, eos = (model.pieces[token].piece for token in (training.unk_id, training.bos_id, training.eos_id))
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (unknown, bos, eos)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids[bos])]
    )
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": tokenizer_config(bos, eos, unknown)}


def tokenizer_config(bos: str, eos: str, unknown: str | None = None) -> bytes:
    """A `tokenizer_config.json` that takes the `tokenizer.json` beside it as it is."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps({key: value for key, value in config.items() if value is not None}, indent=2).encode()
