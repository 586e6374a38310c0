"""From prompts to positions of a run: each once a pass, with its whole record, and from the cache."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from llamajax.config.data import DataConfig, SourceConfig, TokenizerConfig
from llamajax.data.documents import file_groups
from llamajax.data.rows.example import Stretch, find_example
from llamajax.data.rows.prompts import Prompt
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.data.tokens import shards
from llamajax.data.tokens.tokenize_run import look_at_data
from llamajax.errors import DataError
from tests import real_tokenizers
from tests.data.documents.preference_records import answer, user
from tests.data.rows.test_chat_dataset import PLAIN, prepared, refused, shard_files, tokenizer
from tests.tiny import tiny_config

__all__ = ["tokenizer"]

LLAMA2 = str(Path(__file__).parents[3] / "configs" / "chat_templates" / "llama2.jinja")


def records(count):
    """As those of gsm8k."""
    return [
        {"prompt": [user(f"{number} + {number % 7}?")], "answer": f"#### {number + number % 7}", "level": number % 3}
        for number in range(count)
    ]


def source_of(tmp_path, written, name="a.jsonl", **fields):
    (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in written))
    return SourceConfig(kind="prompt", paths=(str(tmp_path / name),), **fields)


def config_of(tmp_path, *sources, changes=None, **fields):
    fields = {
        "seq_len": 64, "held_out_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), "chat_template": PLAIN,
        "tokenizer": TokenizerConfig(path=str(tmp_path / "letters.model")),
    } | fields  # fmt: skip
    settings = {
        "model.vocab_size": 32_000, "objective.kind": "grpo", "init_from": "model", "objective.rollout.max_tokens": 24,
        "objective.rollout.group_size": 4, "train.eval_batches": 0,
    }  # fmt: skip
    return tiny_config(data=DataConfig(sources=sources, **fields)).changed(settings | (changes or {}))


def prompts_of(dataset):
    return [dataset.prompt(position) for position in range(dataset.num_train_rows)]


def test_every_prompt_once_a_pass_with_its_record(tmp_path):
    """With a tokenizer and a template that others made."""
    model = real_tokenizers.mistral("v1")
    mistral = load_tokenizer(model)
    written = records(50)
    table, hinted = tmp_path / "b.parquet", {"prompt": "Once", "hint": {"a": [1.5]}, "b": None}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([hinted]), table)
    sources = source_of(tmp_path, written), SourceConfig(kind="prompt", paths=(str(table),), weight=0.02)
    by = {"chat_template": LLAMA2, "tokenizer": TokenizerConfig(path=str(model))}
    config = config_of(tmp_path, *sources, **by)
    dataset = prepared(config)
    assert dataset.num_train_rows == 51
    found = prompts_of(dataset)
    assert sorted(found) != found
    by_answer = {json.dumps(prompt.record): prompt.ids for prompt in found}
    assert set(by_answer) == set(map(json.dumps, [*written, hinted]))
    for record in written:
        text = f"<s>[INST] {record['prompt'][0]['content']} [/INST]"
        assert by_answer[json.dumps(record)] == tuple(mistral.encode_template(text).tolist())
    once = Prompt(tuple(mistral.encode_prompt("Once")), "Once", hinted)
    assert once in found
    of_first = [len(prompt.ids) for prompt in found if prompt != once]
    assert dataset.summary[0] == (
        f"data       data.sources[0] prompt: 50 prompts, 0.0 MB, {sum(of_first)} tokens, {sum(of_first) / 50:.0f} per"
        f" prompt, at most {max(of_first)}; 50 to train on; held out: 0"
    )
    # A step trains on 32 completions, of 8 prompts.
    assert dataset.epochs(51)["data.sources[0]"] == pytest.approx(8, rel=0.01)
    assert dataset.passes.num_steps(1) == 7
    other = prepared(config.changed({"seed": 1}))
    assert other.fingerprint == dataset.fingerprint
    assert other.prompt(0) != dataset.prompt(0)


@pytest.mark.usefixtures("tokenizer")
def test_attention_is_counted_to_the_longest_completion(tmp_path):
    dataset = prepared(config_of(tmp_path, source_of(tmp_path, [{"prompt": [user("q")]}])))
    length = len(dataset.prompt(0).ids) + 24
    assert dataset.mean_keys(None) == pytest.approx(length * (length - 1) / 2 / 64)
    assert dataset.mean_keys(5) == pytest.approx((15 + (length - 6) * 5) / 64)


@pytest.mark.usefixtures("tokenizer")
def test_equal_prompts_are_on_one_side_of_the_split(tmp_path):
    written = [record | {"prompt": [user(f"question {number % 30}")]} for number, record in enumerate(records(60))]
    dataset = prepared(config_of(tmp_path, source_of(tmp_path, written), held_out_fraction=0.3))
    num_held_out = len(dataset.held_out_rows)
    held_out = [dataset.held_out_prompt(number) for number in range(num_held_out)]
    assert 6 < num_held_out < 40
    train = prompts_of(dataset)
    assert len(train) + num_held_out == 60
    assert not {prompt.ids for prompt in train} & {prompt.ids for prompt in held_out}
    assert {json.dumps(prompt.record) for prompt in [*train, *held_out]} == set(map(json.dumps, written))
    assert dataset.summary[0].endswith(f"; {len(train)} to train on; held out: {num_held_out}")
    none = config_of(tmp_path, source_of(tmp_path, written[:1]), held_out_fraction=0.001, changes={"train.eval_batches": 1})
    message = "data.held_out_fraction: 0.001 holds out no document; raise it, add documents, or set train.eval_batches=0"
    assert refused(DataError, none).startswith(message)


def test_long_prompts_are_left_out(tmp_path, tokenizer):
    short, long, empty = ({"prompt": text, "answer": "x" * 500} for text in ("a b", "a b c d e f", " "))
    source = source_of(tmp_path, [short, long, short | {"answer": "y"}, empty])
    num_tokens = len(tokenizer.encode_prompt("a b"))
    dataset = prepared(config_of(tmp_path, source, seq_len=24 + num_tokens))
    (line,) = dataset.summary
    assert " 3 prompts (1 empty ones skipped), " in line
    assert f" at most {len(tokenizer.encode_prompt('a b c d e f'))}; 2 to train on; " in line
    assert line.endswith(f"; 1 prompts left out, since they exceed {num_tokens} tokens")
    assert [len(prompt.ids) for prompt in prompts_of(dataset)] == [num_tokens] * 2
    message = (
        f"data.sources[0].paths: none of the prompts fits in the {num_tokens - 1} tokens of data.seq_len less"
        " objective.rollout.max_tokens; raise it, or add shorter prompts"
    )
    assert refused(DataError, config_of(tmp_path, source, seq_len=23 + num_tokens)) == message


@pytest.mark.usefixtures("tokenizer")
def test_texts_need_no_template_and_messages_do(tmp_path):
    texts = source_of(tmp_path, [{"prompt": "q"}, {"prompt": "r"}])
    dataset = prepared(config_of(tmp_path, texts, chat_template=None))
    assert dataset.template_sha256 is None
    assert "chat_template.jinja" not in dataset.files
    mixed = source_of(tmp_path, [{"prompt": "q"}, {"prompt": [user("r")]}], "mixed.jsonl")
    message = f"{tmp_path}/mixed.jsonl:2: data.chat_template: is required for prompts of messages, because the tokenizer has"
    assert refused(DataError, config_of(tmp_path, mixed, chat_template=None)).startswith(message)
    log = []
    look_at_data(config_of(tmp_path, mixed), None, log.append)
    assert log == [f"source     prompt: {tmp_path}/mixed.jsonl"]
    assert prepared(config_of(tmp_path, mixed)).template_sha256 is not None
    bad = source_of(tmp_path, [{"prompt": [user("r"), answer("a")]}, *records(3)], "bad.jsonl", max_bad_records=1)
    assert prepared(config_of(tmp_path, bad)).num_train_rows == 3


@pytest.mark.usefixtures("tokenizer")
def test_shards_continue_where_they_stopped_and_are_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    monkeypatch.setattr(shards, "BATCH_BYTES", 1000)
    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    config = config_of(tmp_path, source_of(tmp_path, records(60)), held_out_fraction=0.2)
    dataset = prepared(config)
    found = prompts_of(dataset)
    made = sorted(shard_files(tmp_path))
    assert len(made) > 2
    contents = [path.read_bytes() for path in made]
    made[-1].unlink()
    made[1].write_bytes(b"damaged")
    again = prepared(config)  # the index reads every shard
    assert [path.read_bytes() for path in made] == contents
    assert (again.fingerprint, again.content, again.summary) == (dataset.fingerprint, dataset.content, dataset.summary)
    assert prompts_of(again) == found
    for path in made:
        content = bytearray(path.read_bytes())
        content[-1000:] = bytes(1000)
        path.write_bytes(content)
    assert prompts_of(again) == found
    assert [path.read_bytes() for path in made] == contents


@pytest.mark.usefixtures("tokenizer")
def test_the_first_prompt_is_shown_as_it_is_read(tmp_path):
    dataset = prepared(config_of(tmp_path, source_of(tmp_path, records(1))))
    example = find_example(dataset)
    assert example == ([Stretch("<s>### User\n0 + 0?\n\n### Assistant\n", False)], len(dataset.prompt(0).ids), 0, "prompt")
