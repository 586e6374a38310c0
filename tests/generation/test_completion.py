"""Continuations: the cache changes nothing, ends are respected, two programs write all, and text comes whole."""

import functools
import io
import logging
import re
from typing import Any

import jax
import numpy as np
import pytest
import sentencepiece

from converters.hf_tokenizer import convert_sentencepiece
from llamajax.config.parallel import MeshConfig
from llamajax.data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from llamajax.errors import DataError
from llamajax.generation.completion import Completer, TextStream, check_prompts, encode_prompt, stream_text
from llamajax.generation.sampling import Sampling
from llamajax.parallel.mesh import make_mesh
from llamajax.step.state import init_state
from tests.runs import WORDS
from tests.tiny import single_device_mesh, tiny_config

CONFIG, GREEDY = tiny_config(), Sampling()
MESHES = {
    "one device": single_device_mesh,
    "fsdp, sequence, tensor": lambda: make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)),
}
PROMPTS = [[1, 3, 4, 5], [1], [1, 9, 8, 7, 6, 5, 4, 3, 9, 9], [1, 20, 21]]


class Letters:
    """A tokenizer of one token per character: BOS 1, EOS 2, `a` 3 and so on."""

    bos_id, eos_id, vocab_size = 1, 2, 64

    def encode_batch(self, texts):
        return [np.array([ord(letter) - ord("a") + 3 for letter in text], np.int32) for text in texts]

    def encode_prompt(self, text):
        return [1, *self.encode_batch([text])[0].tolist()]

    def decode(self, ids):
        return "".join(chr(int(i) - 3 + ord("a")) for i in ids)


LETTERS: Any = Letters()  # where a `Tokenizer` is asked for


class Parts:
    """A tokenizer whose token i is the i-th of given bytes."""

    def __init__(self, parts):
        self.parts = parts

    def decode(self, ids):
        return b"".join(self.parts[i] for i in ids).decode(errors="replace")


def told(parts: list[bytes], stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """The pieces of a text that comes in these parts, and whether it was stopped."""
    tokenizer: Any = Parts(parts)
    stream, pieces = TextStream(tokenizer, [], stop), []
    for token in range(len(parts)):
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, True
    return [*pieces, stream.finish()], stream.stopped


def random_cuts(text: str, rng: np.random.Generator) -> list[bytes]:
    data = text.encode()
    ends = sorted({*rng.integers(1, len(data), rng.integers(len(data))).tolist(), len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def test_text_comes_whole_however_it_is_cut():
    text, rng = "na\u00efve \u6f22\u5b57, \U0001f600\U0001f468\u200d\U0001f469! ab", np.random.default_rng(0)
    for _ in range(50):
        pieces, stopped = told(random_cuts(text, rng), ())
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert not stopped


def test_what_is_no_text_is_told_at_the_end():
    pieces, _ = told([b"a", b"\xe6\xbc"], ())
    assert pieces == ["a", "", "\ufffd"]
    assert "".join(told([b"a\xff", b"b"], ())[0]) == "a\ufffdb"


@pytest.mark.parametrize("stop", [("END",), ("\n\n", "END"), ("abcd", "bc"), ("\u5b57!",), ("ab",), ("EE",)], ids=str)
def test_a_stop_text_is_never_told_wherever_it_is_cut(stop):
    text, rng = "aEN \u6f22\u5b57EE abcd \u6f22\u5b57! a\nb\n\nENEND more END", np.random.default_rng(1)
    ends = min((text.index(s) + len(s), text.index(s)) for s in stop if s in text)
    for _ in range(50):
        pieces, stopped = told(random_cuts(text, rng), stop)
        assert "".join(pieces) == text[: ends[1]]
        assert stopped


def test_what_may_begin_a_stop_text_waits_no_longer_than_needed():
    assert told([b"a", b"E", b"N", b"x", b"E"], ("END",))[0] == ["a", "", "", "ENx", "", "E"]


def train_like_llama_2(texts: list[str]) -> bytes:
    """A SentencePiece model that puts a space before a text when it encodes, and takes it off when it decodes."""
    model = io.BytesIO()
    settings = {"model_type": "bpe", "vocab_size": 320, "hard_vocab_limit": False, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **settings)
    return model.getvalue()


@pytest.mark.parametrize("kind", ["ours", "ours for Hugging Face", "Llama 2's"])
def test_streamed_text_is_the_decoded_text(kind, tmp_path):
    """Real tokenizers put spaces between tokens and spell characters in bytes."""
    texts = [" ".join(WORDS)] * 20
    files = {"tokenizer.model": train_like_llama_2(texts)}
    if kind != "Llama 2's":
        files = {"tokenizer.model": train_sentencepiece(texts, vocab_size=320)}
    if kind == "ours for Hugging Face":
        body = convert_sentencepiece(files["tokenizer.model"], bos_id=1)
        assert body is not None
        files = {"tokenizer.json": body}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    tokenizer = load_tokenizer(tmp_path)
    text = " reads \u6f22\u5b57\U0001f600\U0001f600 a row of"
    prompt, whole = (tokenizer.encode_batch([start])[0].tolist() for start in ("the model", "the model" + text))
    assert whole[: len(prompt)] == prompt
    stream = TextStream(tokenizer, [tokenizer.bos_id, *prompt], ())
    pieces = [stream.push(token) for token in whole[len(prompt) :]]
    assert "".join(pieces) == text
    assert stream.finish() == ""
    assert len([piece for piece in pieces if piece]) > 5


@functools.cache
def model_on(mesh: str):
    """The model, with the same weights on every mesh; the mesh is the current one from then on."""
    return init_state(CONFIG).model


def make_completer(mesh: str, *, sampling=GREEDY, seed=0, max_seq_len=32, end_ids=(), tokenizer=None):
    jax.set_mesh(MESHES[mesh]())
    settings = {"sampling": sampling, "key": jax.random.key(seed), "max_seq_len": max_seq_len, "end_ids": end_ids}
    return Completer(model_on(mesh), tokenizer or LETTERS, **settings)


def completions(completer, prompts, *, max_tokens=8, **settings):
    pieces = list(completer.complete(prompts, max_tokens=max_tokens, **settings))
    found = {piece.row: piece.completion for piece in pieces if piece.completion}
    for row, completion in found.items():
        assert "".join(piece.text for piece in pieces if piece.row == row) == completion.text
    return [found[row] for row in range(len(found))]


@pytest.fixture(scope="module")
def greedy():
    """Continuations when the whole text is read again for every token, one row at a time."""
    jax.set_mesh(single_device_mesh())
    model, forward = model_on("one device"), jax.jit(lambda model, row: model(row))
    texts, logprobs = [list(prompt) for prompt in PROMPTS], [0.0] * len(PROMPTS)
    for _ in range(8):
        for i, text in enumerate(texts):
            row = np.zeros((1, 32), np.int32)
            row[0, : len(text)] = text
            scores = np.asarray(forward(model, row))[0, len(text) - 1].astype(np.float64)
            text.append(int(scores.argmax()))
            logprobs[i] += scores.max() - np.log(np.exp(scores).sum())
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)], logprobs


@pytest.mark.parametrize("mesh", ["one device", "fsdp, sequence, tensor"])
def test_greedy_text_is_that_of_reading_everything_again(mesh, greedy):
    completer = make_completer(mesh)
    found = completions(completer, PROMPTS, batch_size=4)
    assert [list(completion.tokens) for completion in found] == greedy[0]
    np.testing.assert_allclose([completion.logprob for completion in found], greedy[1], rtol=1e-4)
    assert {completion.finish_reason for completion in found} == {"length"}


def test_prompts_one_by_one_compile_once_and_write_the_cache_in_place(greedy, caplog):
    jax.clear_caches()  # what another test compiled
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        completer = make_completer("one device")
        for tokens, prompt in zip(greedy[0], PROMPTS, strict=True):
            if 2 < len(prompt) <= 4:  # of one size when rounded up
                assert [list(found.tokens) for found in completions(completer, [prompt])] == [tokens]
        completions(completer, [PROMPTS[0]] * 3)  # one after the other
    compiled = [re.search(r"Compiling (?:jit\()?(\w+)", record.getMessage()) for record in caplog.records]
    steps = [match[1] for match in compiled if match and match[1] in ("_prefill", "_decode")]
    assert sorted(steps) == ["_decode", "_prefill"]
    (decode,) = (program for (step, _), program in completer._programs.items() if step.__name__ == "_decode")
    model, num_slots = CONFIG.model, 16
    cache_bytes = 2 * 4 * model.num_layers * num_slots * model.num_kv_heads * model.head_dim
    memory = decode.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= cache_bytes


def test_samples_differ_and_depend_neither_on_mesh_nor_batch():
    sampling = Sampling(temperature=1.0, top_k=20)
    completer = make_completer("one device", sampling=sampling)
    expected = [found.tokens for found in completions(completer, PROMPTS[:2], num_samples=3, batch_size=8)]
    assert len(set(expected)) == 6  # also of different prompts
    completer = make_completer("fsdp, sequence, tensor", sampling=sampling)
    assert [found.tokens for found in completions(completer, PROMPTS[:2], num_samples=3, batch_size=2)] == expected


def test_a_text_ends_at_an_end_token_which_is_no_text(greedy):
    end = greedy[0][0][4]
    first = greedy[0][0].index(end)
    completer = make_completer("one device", end_ids=[end, 999])
    found, *_ = completions(completer, PROMPTS, batch_size=8)
    assert (list(found.tokens), found.finish_reason) == (greedy[0][0][: first + 1], "stop")
    assert found.text == Letters().decode(greedy[0][0][:first])


def test_a_text_ends_before_a_stop_text(greedy):
    text = Letters().decode(greedy[0][0])
    completer = make_completer("one device")
    (found,) = completions(completer, PROMPTS[:1], stop=(text[2:5],))
    assert found.finish_reason == "stop"
    assert found.text == text[: text.index(text[2:5])]
    assert len(found.tokens) == text.index(text[2:5]) + 3


class FewLetters(Letters):
    """Knows fewer ids than the model has rows."""

    vocab_size = 7


def test_a_text_ends_where_there_is_no_room_and_has_only_ids_that_the_tokenizer_knows():
    completer = make_completer("one device", max_seq_len=13, sampling=Sampling(temperature=3.0), tokenizer=FewLetters())
    found = completions(completer, PROMPTS, max_tokens=10, batch_size=4)
    assert [len(completion.tokens) for completion in found] == [9, 10, 3, 10]
    assert {completion.finish_reason for completion in found} == {"length"}
    assert {token for completion in found for token in completion.tokens} <= set(range(7))
    with pytest.raises(DataError, match="prompt 2: 13 tokens leave no room in max_seq_len=13"):
        next(completer.complete([[1], [1] * 13], max_tokens=1))
    check_prompts([[1] * 12], 13, 2)
    with pytest.raises(DataError, match="prompt 2: token id 64 is not among the 64 rows of the model's table"):
        next(completer.complete([[1], [1, 64]], max_tokens=1))


def test_no_prompts_no_pieces():
    completer = make_completer("one device")
    assert list(completer.complete([], max_tokens=3)) == []


def test_a_sample_of_a_run(greedy):
    jax.set_mesh(MESHES["one device"]())
    settings = {"max_tokens": 1000, "temperature": 0.0, "key": jax.random.key(0), "seq_len": 12}
    pieces = stream_text(model_on("one device"), LETTERS, "abc", **settings)
    tokens = greedy[0][0][: greedy[0][0].index(2)] if 2 in greedy[0][0] else greedy[0][0]
    assert "".join(pieces) == LETTERS.decode(tokens)


def test_a_sample_without_room_is_refused():
    assert encode_prompt(LETTERS, "abc", 5) == [1, 3, 4, 5]
    with pytest.raises(DataError, match="4 tokens leave no room in rows of 4"):
        encode_prompt(LETTERS, "abc", 4)
