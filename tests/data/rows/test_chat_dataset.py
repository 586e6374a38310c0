"""From chat data to rows: learnt is what the assistant says, all of it once, next to texts, and from the cache."""

import dataclasses
import functools
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from llamajax.config.conversations import ChatFormat
from llamajax.config.data import SourceConfig, TokenizerConfig
from llamajax.data.chat.chat_template import load_chat_template
from llamajax.data.documents import file_groups
from llamajax.data.rows.dataset import prepare
from llamajax.data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from llamajax.data.tokens import shards
from llamajax.data.tokens.shards import read_shard
from llamajax.errors import ConfigError, DataError
from llamajax.step.batch import IGNORE
from tests.data.chat.chat_from_docs import conversations, record_of, write_chat_jsonl
from tests.data.rows.test_dataset import config_for, documents_of, epoch, jsonl_source, num_rows, random_texts

PLAIN = str(Path(__file__).parents[3] / "configs" / "chat_templates" / "plain.jinja")


@functools.cache
def trained() -> bytes:
    texts = [turn["content"] for messages in conversations(200) for turn in messages] + ["### User\n### Assistant\n"] * 50
    return train_sentencepiece(texts, vocab_size=500)


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "letters.model"
    path.write_bytes(trained())
    return load_tokenizer(path)


def chat_source(tmp_path, name, count, chat_format: ChatFormat = "messages", **fields):
    written = write_chat_jsonl(tmp_path / name, count, chat_format)
    return SourceConfig(kind="chat", paths=(str(tmp_path / name),), chat_format=chat_format, **fields), written


def chat_config(tmp_path, *sources, **fields):
    return config_for(tmp_path, *sources, **({"seq_len": 512, "chat_template": PLAIN} | fields))


def prepared(config, **arguments):
    return prepare(config, log=lambda line: None, **arguments)


def said_in(targets, tokenizer):
    """Each of the assistant's turns in a conversation's targets, without the token that ends it."""
    turns, turn = [], []
    for target in targets.tolist():
        if target == tokenizer.eos_id:
            turns.append(tokenizer.decode(turn))
            turn = []
        elif target != IGNORE:
            turn.append(target)
    assert not turn, "the end of every turn is learnt"
    return tuple(turns)


def answers(messages):
    return tuple(message["content"] for message in messages if message["role"] == "assistant")


@pytest.mark.parametrize("chat_format", ["messages", "sharegpt", "alpaca"])
def test_every_answer_is_learnt_once_and_nothing_else(tmp_path, tokenizer, chat_format):
    source, written = chat_source(tmp_path, "chat.jsonl", 150, chat_format)
    dataset = prepared(chat_config(tmp_path, source))
    found = []
    for positions, text, targets in documents_of(epoch(dataset, num_rows(dataset)), tokenizer):
        assert positions.tolist() == list(range(len(positions)))
        found.append((text.removeprefix("### ").partition("\n")[0], said_in(targets, tokenizer)))
    expected = [(messages[0]["role"].capitalize(), answers(messages)) for messages in written]
    assert sorted(found) == sorted(expected)
    template = load_chat_template(Path(PLAIN), tokenizer)
    assert template is not None
    assert dataset.template_sha256 == template.sha256


def test_golden_row(tmp_path, tokenizer):
    source, _ = chat_source(tmp_path, "chat.jsonl", 1)
    record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(record) + "\n")
    dataset = prepared(chat_config(tmp_path, source, seq_len=64))
    row = dataset.train_row(0)
    parts = tokenizer.encode_template_parts(["<s>### User\nHi\n\n### Assistant\n", "Yo</s>", "\n"])
    ids = np.concatenate(parts)
    prompt, said, n = len(parts[0]), len(parts[1]), len(ids)
    assert row["tokens"].tolist() == [*ids[:-1], *[0] * (65 - n)]
    expected = [IGNORE] * 64
    expected[prompt - 1 : prompt - 1 + said] = ids[prompt : prompt + said].tolist()
    assert row["targets"].tolist() == expected
    assert row["segment_ids"].tolist() == [1] * (n - 1) + [0] * (65 - n)
    assert row["positions"].tolist() == [*range(n - 1), *[0] * (65 - n)]
    assert dataset.summary == (
        f"data       data.sources[0] chat: 1 documents, 0.0 MB, {n} tokens, {n} per document;"
        f" 1 rows, {(n - 1) / 64:.2%} full;"
        " held out: 0 rows",
    )


def test_long_conversations_are_cut_or_left_out(tmp_path, tokenizer):
    turns = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    turns.append([{"role": "user", "content": "q" * 200}, {"role": "assistant", "content": "a"}])  # left out
    turns.append([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b " * 100}])  # cut
    turns.append([*turns[0], *turns[1]])  # cut
    turns.append([{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}])  # empty
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    source = SourceConfig(kind="chat", paths=(str(tmp_path / "chat.jsonl"),))
    dataset = prepared(chat_config(tmp_path, source, seq_len=64))
    (line,) = dataset.summary
    assert "4 documents (1 empty ones skipped)" in line
    assert line.endswith("; 2 conversations cut to 64 tokens; 1 left out, since no answer is within 64 tokens")
    rows = epoch(dataset, num_rows(dataset))
    assert all(len(positions) <= 64 for positions, _, _ in documents_of(rows, tokenizer))
    assert sorted(row["segment_ids"].max() for row in rows) == [1, 1, 1]
    assert all((row["targets"] != IGNORE).any() for row in rows)
    with pytest.raises(DataError, match=r"paths: no conversation has an answer within the 8 tokens of data.seq_len; raise"):
        prepared(chat_config(tmp_path, source, seq_len=8))


def test_rows_are_full(tmp_path, tokenizer):
    source, _ = chat_source(tmp_path, "chat.jsonl", 600)
    (line,) = prepared(chat_config(tmp_path, source, seq_len=1024)).summary
    assert float(line.split("rows, ")[1].split("%")[0]) > 95


LAST_ONLY = """\
{{- bos_token }}{%- for m in messages %}
{{- '### ' + m.role + '\n' }}{%- if m.role == 'assistant' and loop.last %}{{- 'Hm. ' }}{%- endif %}
{{- m.content + (eos_token if m.role == 'assistant' else '\n') }}{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant\n' }}{%- endif %}"""


def test_answers_that_the_template_changes_are_learnt_once_each(tmp_path, tokenizer, monkeypatch):
    """In documents of their own, which are counted, on one side, and made again after a kill."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    (tmp_path / "last.jinja").write_text(LAST_ONLY)
    source, written = chat_source(tmp_path, "chat.jsonl", 60)
    config = chat_config(tmp_path, source, chat_template=str(tmp_path / "last.jinja"))
    dataset = prepared(config)
    expected = sorted((f"Hm. {answer}",) for messages in written for answer in answers(messages))
    more = len(expected) - len(written)
    (line,) = dataset.summary
    assert f" {len(expected)} documents, " in line
    split = sum(len(answers(messages)) > 1 for messages in written)
    told = f"{split} conversations are {split + more} documents, because the template changes earlier answers"
    assert line.endswith(f"; {told}")
    found = [said_in(targets, tokenizer) for _, _, targets in documents_of(epoch(dataset, num_rows(dataset)), tokenizer)]
    assert sorted(found) == expected
    made = sorted(shard_files(tmp_path))
    assert len(made) > 3
    contents = [path.read_bytes() for path in made]
    made[-1].unlink()
    made[1].write_bytes(b"damaged")
    shutil.rmtree(tmp_path / "cache" / "index-1")
    assert prepared(config).fingerprint == dataset.fingerprint
    assert [path.read_bytes() for path in made] == contents


def test_a_template_that_teaches_no_end_is_told_of_before_the_run(tmp_path, tokenizer):
    source, _ = chat_source(tmp_path, "chat.jsonl", 5)
    (tmp_path / "open.jinja").write_text(Path(PLAIN).read_text().replace("eos_token + ", ""))
    log = []
    prepare(chat_config(tmp_path, source, chat_template=str(tmp_path / "open.jinja")), log=log.append)
    assert log[-2] == (
        f"warning    {tmp_path}/open.jinja: chat template: writes no token after an answer that generation stops at, so the"
        " model never learns to stop; write </s> there"
    )
    log = []
    prepare(chat_config(tmp_path, source), log=log.append)
    assert not [line for line in log if line.startswith("warning")]


def write_tokens(path, shard):
    """Writes documents of a shard as transformers' models take them."""
    with path.open("w") as file:
        for start, end in itertools.pairwise(shard.offsets[:].tolist()):
            ids, learnt = shard.tokens[start:end].tolist(), shard.is_learnt(start, end).tolist()
            labels = [token if is_learnt else -100 for token, is_learnt in zip(ids, learnt, strict=True)]
            file.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")


def test_records_of_tokens_make_the_rows_of_their_conversations(tmp_path, tokenizer):
    source, _ = chat_source(tmp_path, "chat.jsonl", 40)
    rows = epoch(dataset := prepared(chat_config(tmp_path, source)), num_rows(dataset))
    (shard,) = shard_files(tmp_path)
    write_tokens(tmp_path / "tokens.jsonl", read_shard(shard))
    tokens = SourceConfig(kind="tokenized", paths=(str(tmp_path / "tokens.jsonl"),))
    config = config_for(tmp_path, tokens, seq_len=512)
    log = []
    dataset = prepare(config, log=log.append)
    np.testing.assert_equal(epoch(dataset, num_rows(dataset)), rows)
    assert dataset.template_sha256 is None
    assert " tokenized: 40 documents, " in dataset.summary[0]
    assert "MB" not in dataset.summary[0]
    assert not [line for line in log if line.startswith("warning")]
    (tmp_path / "tokens.jsonl").write_text('{"input_ids": [1, 500]}\n')
    message = (
        f"{tmp_path}/tokens.jsonl:1: data.sources[0].fields: 500 is no id of the 500 tokens of {tokenizer.source}; name"
    )
    assert refused(DataError, config).startswith(message)


def test_tokens_that_teach_no_end_are_told_of_before_the_run(tmp_path, tokenizer):
    (tmp_path / "tokens.jsonl").write_text('{"input_ids": [1, 300, 301, 2], "labels": [-100, 300, 301, -100]}\n' * 3)
    log = []
    source = SourceConfig(kind="tokenized", paths=(str(tmp_path / "tokens.jsonl"),))
    prepare(config_for(tmp_path, source), log=log.append)
    (line,) = [line for line in log if line.startswith("warning")]
    assert line == (
        "warning    data.sources[0]: its labels never include </s> or another token without text, so the model never learns"
        " to stop; give the token that ends each answer its label"
    )


def test_mixed_with_texts_by_weight(tmp_path, tokenizer):
    chat, _ = chat_source(tmp_path, "chat.jsonl", 100, weight=0.25)
    text = jsonl_source(tmp_path, "text.jsonl", random_texts(300), weight=0.75)
    config = chat_config(tmp_path, text, chat, held_out_fraction=0.1, eval_batches=1)
    dataset = prepared(config)
    rows = [dataset.train_row(position) for position in range(80)]
    is_chat = [((row["targets"] == IGNORE) & (row["segment_ids"] > 0)).any() for row in rows]
    assert sum(is_chat) == 20
    for row, of_chat in zip(rows, is_chat, strict=True):
        if not of_chat:
            np.testing.assert_array_equal(row["targets"] != IGNORE, row["segment_ids"] > 0)
    assert len(dataset.held_out_rows) > 2
    again = prepared(config.changed({"data.cache_dir": str(tmp_path / "other")}))
    assert again.fingerprint == dataset.fingerprint
    for position in range(80):
        np.testing.assert_equal(again.train_row(position), rows[position])


def test_the_split_is_by_conversation_whatever_its_format(tmp_path, tokenizer):
    written = [messages[:2] for messages in conversations(150) if messages[0]["role"] == "user"]
    sources = []
    for chat_format in ("messages", "sharegpt", "alpaca"):
        path = tmp_path / f"{chat_format}.jsonl"
        path.write_text("".join(json.dumps(record_of(messages, chat_format)) + "\n" for messages in [*written, written[0]]))
        sources.append(SourceConfig(kind="chat", paths=(str(path),), chat_format=chat_format))
    dataset = prepared(chat_config(tmp_path, *sources, held_out_fraction=0.3, eval_batches=1))
    train = epoch(dataset, 3 * sum(num_rows(dataset, index) for index in range(3)))
    held_out = [dataset.held_out_rows[index] for index in range(len(dataset.held_out_rows))]
    sides = [{text for _, text, _ in documents_of(rows, tokenizer)} for rows in (train, held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == len({str(messages) for messages in written})
    assert 0.15 < len(sides[1]) / len(written) < 0.45


def shard_files(tmp_path):
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.shard")}


def test_the_cache_follows_template_and_format(tmp_path, tokenizer):
    chat, _ = chat_source(tmp_path, "chat.jsonl", 20)
    text = jsonl_source(tmp_path, "text.jsonl", random_texts(50))
    config = chat_config(tmp_path, text, chat)
    first = prepared(config)
    files = shard_files(tmp_path)
    assert len(files) == 2
    log = []
    assert prepare(config, log=log.append).fingerprint == first.fingerprint
    assert [line.split()[0] for line in log] == ["source", "source", "data", "data"]
    other = tmp_path / "other.jinja"
    other.write_text(Path(PLAIN).read_text().replace("###", "#"))
    changed = prepared(chat_config(tmp_path, text, chat, chat_template=str(other)))
    assert changed.fingerprint != first.fingerprint
    assert changed.template_sha256 != first.template_sha256
    after = shard_files(tmp_path)
    assert len(after) == 3, "texts do not depend on the template"
    assert files.items() <= after.items()
    # A line that is a conversation in two formats.
    both = record_of(conversations(2)[1], "messages") | {"instruction": "Q", "output": "A"}
    (tmp_path / "chat.jsonl").write_text(json.dumps(both) + "\n")
    formats = [dataclasses.replace(chat, chat_format=chat_format) for chat_format in ("messages", "alpaca")]
    fingerprints = {prepared(chat_config(tmp_path, of_format)).fingerprint for of_format in formats}
    assert len(fingerprints) == 2


def test_shards_go_on_where_they_stopped(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    monkeypatch.setattr(shards, "BATCH_BYTES", 200)
    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    source, written = chat_source(tmp_path, "chat.jsonl", 40)
    config = chat_config(tmp_path, source)
    rows = epoch(prepared(config), 5)
    made = sorted(shard_files(tmp_path))
    assert len(made) > 5
    contents = {path: path.read_bytes() for path in made}
    for path in made[-3:]:
        path.unlink()
    shutil.rmtree(tmp_path / "cache" / "index-1")  # which is made of whole entries
    kept = {path: path.stat().st_mtime_ns for path in made[:-3]}
    dataset = prepared(config)
    assert {path: path.read_bytes() for path in shard_files(tmp_path)} == contents
    assert kept.items() <= shard_files(tmp_path).items()
    np.testing.assert_equal(epoch(dataset, 5), rows)
    all_shards = [read_shard(path) for path in made]
    assert sum(len(shard.hashes) for shard in all_shards) == len(written)
    learnt = sum(shard.is_learnt(0, len(shard.tokens)).sum() for shard in all_shards)
    targets = np.concatenate([row["targets"] for row in epoch(dataset, num_rows(dataset))])
    assert learnt == (targets != IGNORE).sum()
    assert all(shard.learnt and len(shard.learnt) == -(-len(shard.tokens) // 8) for shard in all_shards)


def test_the_template_comes_along(tmp_path, tokenizer):
    """Under the name and in the place where it is found with the tokenizer, wherever it came from."""
    source, _ = chat_source(tmp_path, "chat.jsonl", 5)
    named = prepared(chat_config(tmp_path, source))
    assert list(named.files) == ["tokenizer.model", "chat_template.jinja"]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, content in named.files.items():
        (folder / name).write_bytes(content)
    model = load_tokenizer(folder)
    resumed = prepared(chat_config(tmp_path, source, chat_template=None, tokenizer=TokenizerConfig()), tokenizer=model)
    assert resumed.fingerprint == named.fingerprint
    assert resumed.template_sha256 == named.template_sha256
    assert resumed.files == {**model.files, "chat_template.jinja": Path(PLAIN).read_bytes()}
    text_only = prepared(config_for(tmp_path, jsonl_source(tmp_path, "a.jsonl", random_texts(5))))
    assert text_only.files == tokenizer.files
    assert text_only.template_sha256 is None


def refused(error, config, **arguments):
    with pytest.raises(error) as caught:
        prepared(config, **arguments)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_no_template(tmp_path, tokenizer):
    source, _ = chat_source(tmp_path, "chat.jsonl", 5)
    message = (
        "data.chat_template: is required for sources of kind=chat or preference, because the tokenizer has none; name a"
        " Jinja file, for example one of configs/chat_templates/"
    )
    assert refused(ConfigError, chat_config(tmp_path, source, chat_template=None)) == message
    trained = chat_config(tmp_path, source, chat_template=None, tokenizer=TokenizerConfig())
    assert refused(ConfigError, trained) == message


def test_a_conversation_that_the_template_refuses_is_named(tmp_path, tokenizer):
    source, _ = chat_source(tmp_path, "chat.jsonl", 2)
    with (tmp_path / "chat.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "assistant", "content": "I begin"}]}) + "\n")
    llama2 = PLAIN.replace("plain", "llama2")
    assert refused(DataError, chat_config(tmp_path, source, chat_template=llama2)) == (
        f"{tmp_path}/chat.jsonl:3: {llama2}: chat template: refuses the conversation: user and assistant must take turns,"
        " and the user begins; correct the template or the conversation"
    )


def test_conversations_that_the_template_refuses_may_be_left_out(tmp_path, tokenizer):
    source, _ = chat_source(tmp_path, "chat.jsonl", 2)
    with (tmp_path / "chat.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "assistant", "content": "I begin"}]}) + "\n{}\n")
    llama2 = PLAIN.replace("plain", "llama2")
    fewer, enough = (dataclasses.replace(source, max_bad_records=bound) for bound in (1, 2))
    message = refused(DataError, chat_config(tmp_path, fewer, chat_template=llama2))
    assert message.endswith("; data.sources[0].max_bad_records: 1 allows no more")
    (line,) = prepared(chat_config(tmp_path, enough, chat_template=llama2)).summary
    assert ": 2 documents, " in line


def test_the_models_tokenizer(tmp_path, tokenizer):
    source = jsonl_source(tmp_path, "a.jsonl", random_texts(20))
    unnamed = config_for(tmp_path, source, tokenizer=TokenizerConfig())
    dataset = prepared(unnamed, tokenizer=tokenizer)
    assert dataset.tokenizer is tokenizer
    assert prepared(config_for(tmp_path, source), tokenizer=tokenizer).fingerprint == dataset.fingerprint
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.model").write_bytes(train_sentencepiece(random_texts(200), vocab_size=300))
    assert refused(ConfigError, config_for(tmp_path, source), tokenizer=load_tokenizer(other)) == (
        f"data.tokenizer.path: {tmp_path}/letters.model is not the tokenizer that the model was trained with,"
        f" {other}/tokenizer.model; remove data.tokenizer.path to use that one"
    )
    assert refused(
        ConfigError, config_for(tmp_path, source, tokenizer=TokenizerConfig(), vocab_size=100), tokenizer=tokenizer
    ) == (f"model.vocab_size: 100 is below the 500 tokens of {tmp_path}/letters.model; raise it to 500 or more")


def test_a_tokenizer_can_be_trained_on_what_is_said(tmp_path):
    source, written = chat_source(tmp_path, "chat.jsonl", 60)
    dataset = prepared(chat_config(tmp_path, source, tokenizer=TokenizerConfig(), vocab_size=400, seq_len=1024))
    found = [
        said_in(targets, dataset.tokenizer)
        for _, _, targets in documents_of(epoch(dataset, num_rows(dataset)), dataset.tokenizer)
    ]
    assert sorted(found) == sorted(map(answers, written))


def test_a_template_file_that_is_not_there_is_found_before_the_run(tmp_path, tokenizer):
    source, _ = chat_source(tmp_path, "chat.jsonl", 1)
    assert not [problem for problem in chat_config(tmp_path, source).file_problems() if problem.startswith("data.chat")]
    problems = chat_config(tmp_path, source, chat_template="nowhere.jinja").file_problems()
    assert f"data.chat_template: no file matches nowhere.jinja; relative paths start at {Path.cwd()}" in problems
