"""Rows of preferences: both answers of a pair side by side, with segment ids that say which is which."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from llamajax.config.conversations import ChatForm
from llamajax.config.data import SourceConfig
from llamajax.data.chat.chat_template import load_chat_template
from llamajax.data.chat.chat_tokens import encode_conversation
from llamajax.data.documents import file_groups
from llamajax.data.documents.conversations import conversation_of
from llamajax.data.rows.dataset import prepare
from llamajax.data.rows.example import Stretch, find_example
from llamajax.data.rows.packing import fill_row
from llamajax.data.rows.preferences import fill_preferences, mismatched, whole_targets
from llamajax.data.tokens import shards
from llamajax.data.tokens.stores import Piece
from llamajax.errors import DataError
from llamajax.step.batch import IGNORE
from tests.data.rows.test_chat_dataset import PLAIN, chat_config, chat_source, prepared, refused, shard_files, tokenizer
from tests.data.rows.test_dataset import epoch, jsonl_source, num_rows, random_texts

__all__ = ["tokenizer"]

X = IGNORE


def piece(chosen, rejected, num_prompt) -> Piece:
    """A preference; all behind its prompt is learnt."""
    is_learnt = [at >= num_prompt for side in (chosen, rejected) for at in range(len(side))]
    is_chosen = [True] * len(chosen) + [False] * len(rejected)
    return Piece(np.array([*chosen, *rejected], np.uint16), np.array(is_learnt[1:]), np.array(is_chosen))


PAIRED = fill_preferences([piece([1, 2, 3, 4], [1, 2, 5], 2), piece([6, 7], [6, 8, 9], 1)], 14)
LABELLED = fill_preferences([piece([1, 2, 3, 4], [], 2), piece([], [5, 6], 1), piece([], [7, 8, 9, 10], 3)], 12)


def as_lists(row):
    return {name: values.tolist() for name, values in row.items()}


def test_golden_rows():
    assert as_lists(PAIRED) == {
        "tokens": [1, 2, 3, 4, 1, 2, 5, 6, 7, 6, 8, 9, 0, 0],
        "targets": [X, 3, 4, X, X, 5, X, 7, X, 8, 9, X, X, X],
        "segment_ids": [1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 0, 0],
        "positions": [0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1, 2, 0, 0],
    }
    assert as_lists(LABELLED) == {
        "tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0],
        "targets": [X, 3, 4, X, 6, X, X, X, 10, X, X, X],
        "segment_ids": [1, 1, 1, 1, 4, 4, 6, 6, 6, 6, 0, 0],
        "positions": [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 0],
    }
    assert all(values.dtype == np.int32 for row in (PAIRED, LABELLED) for values in row.values())


def test_mismatched_gives_each_prompt_the_answer_before():
    before = as_lists(LABELLED)
    row = mismatched(LABELLED)
    assert as_lists(row) == {
        "tokens": [1, 2, 10, 5, 3, 4, 7, 8, 9, 6, 0, 0],
        "targets": [X, 10, X, 3, 4, X, X, X, 6, X, X, X],
        "segment_ids": [1, 1, 1, 4, 4, 4, 6, 6, 6, 6, 0, 0],
        "positions": [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 0],
    }
    assert all(values.dtype == np.int32 for values in row.values())
    assert as_lists(LABELLED) == before
    # As many rotations as sequences are none.
    again = LABELLED
    for _ in range(3):
        again = mismatched(again)
    np.testing.assert_equal(again, LABELLED)
    full = fill_preferences([piece([1, 2, 3], [], 1), piece([], [4, 5], 1)], 5)
    assert as_lists(mismatched(full))["tokens"] == [1, 5, 4, 2, 3]
    alone = fill_preferences([piece([1, 2, 3], [], 1)], 4)
    np.testing.assert_equal(mismatched(alone), alone)
    np.testing.assert_equal(mismatched(fill_row([], 4)), fill_row([], 4))


def test_mismatched_of_rows_whose_last_tokens_are_only_targets():
    """As rows of conversations are."""
    learnt = [np.array([False, True, True]), np.array([True])]
    row = fill_row([np.array([1, 2, 3, 4]), np.array([5, 6])], 6, learnt)
    assert as_lists(mismatched(row)) == {
        "tokens": [1, 2, 5, 3, 0, 0],
        "targets": [X, 6, 3, 4, X, X],
        "segment_ids": [1, 1, 2, 2, 0, 0],
        "positions": [0, 1, 0, 1, 0, 0],
    }


def test_whole_targets_are_all_next_tokens_of_a_sequence():
    assert whole_targets(PAIRED).tolist() == [2, 3, 4, X, 2, 5, X, 7, X, 8, 9, X, X, X]
    assert whole_targets(PAIRED).dtype == np.int32
    full = fill_preferences([piece([1, 2, 3], [4, 5], 1)], 5)
    assert whole_targets(full).tolist() == [2, 3, X, 5, X]
    chat = fill_row([np.array([1, 2, 3]), np.array([5, 6])], 4, [np.array([False, True]), np.array([True])])
    assert whole_targets(chat).tolist() == [2, 3, 6, X]


def records(count, seed=0):
    rng = np.random.default_rng(seed)

    def words(longest):
        return "".join(rng.choice(list("abcdefg "), rng.integers(1, longest))).strip() or "a"

    return [
        {"prompt": f"{number} {words(20)}", "chosen": f"+{words(40)}", "rejected": f"-{words(40)}"}
        for number in range(count)
    ]


def labelled(pairs):
    one = ({"completion": pair["chosen"], "label": True} for pair in pairs[::2])
    other = ({"completion": pair["rejected"], "label": False} for pair in pairs[1::2])
    of_pairs = itertools.chain.from_iterable(zip(one, other, strict=True))
    return [{"prompt": pair["prompt"], **answer} for pair, answer in zip(pairs, of_pairs, strict=True)]


def source_of(tmp_path, written, name="pairs.jsonl", **fields):
    (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in written))
    return SourceConfig(kind="preference", paths=(str(tmp_path / name),), **fields)


def sequences(rows):
    """Every sequence of the rows: row, segment id, tokens, targets; positions begin at 0 in each."""
    for number, row in enumerate(rows):
        for segment in dict.fromkeys(row["segment_ids"][row["segment_ids"] > 0].tolist()):
            inside = row["segment_ids"] == segment
            assert row["positions"][inside].tolist() == list(range(inside.sum()))
            yield number, segment, row["tokens"][inside], row["targets"][inside]


@pytest.fixture
def encoded(tokenizer):
    """Returns the tokens of an answer to a prompt, and which of them are learnt."""
    template = load_chat_template(Path(PLAIN), tokenizer)
    assert template is not None

    def encode(prompt, answer):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        (found,) = encode_conversation(template, tokenizer, conversation_of({"messages": messages}, ChatForm()))
        return found

    return encode


def must_be(tokens, targets, expected):
    ids, learnt = expected
    assert tokens.tolist() == ids.tolist()
    assert targets.tolist() == [*np.where(learnt[1:], ids[1:], IGNORE).tolist(), IGNORE]


def test_every_pair_is_in_one_row_once(tmp_path, tokenizer, encoded):
    written = records(60)
    dataset = prepared(chat_config(tmp_path, source_of(tmp_path, written), seq_len=256, objective="kto"))
    rows = epoch(dataset, num_rows(dataset))
    found = {}
    of_rows = list(sequences(rows))
    for (number, chosen, *better), (other, rejected, *worse) in zip(of_rows[::2], of_rows[1::2], strict=True):
        assert (number, rejected) == (other, chosen + 1)
        assert chosen % 2 == 1
        prompt = tokenizer.decode(better[0]).split("\n")[1]
        found[prompt] = better, worse
    assert [segment for number, segment, *_ in of_rows if number == 0] == list(range(1, rows[0]["segment_ids"].max() + 1))
    assert len(found) == 60
    for record in written:
        for side, (tokens, targets) in zip(("chosen", "rejected"), found[record["prompt"]], strict=True):
            must_be(tokens, targets, encoded(record["prompt"], record[side]))
    (line,) = dataset.summary
    assert line.startswith("data       data.sources[0] preference: 60 pairs, 0.0 MB, ")
    assert " per pair; " in line
    assert line.endswith(" full; held out: 0 rows")
    assert dataset.preferences == ("pairs",)
    pairs = dataset.rows.order[0]
    assert pairs is not None
    assert pairs.pairs_of_documents().sum() == (rows[0]["segment_ids"] > 0).sum()
    assert len(pairs.pairs_of_documents()) == rows[0]["segment_ids"].max()


def test_answers_with_labels(tmp_path, tokenizer, encoded):
    written = labelled(records(40))
    dataset = prepared(chat_config(tmp_path, source_of(tmp_path, written), seq_len=256, objective="kto"))
    by_prompt = {record["prompt"]: record for record in written}
    last = 0
    for _, segment, tokens, targets in sequences(epoch(dataset, num_rows(dataset))):
        record = by_prompt.pop(tokenizer.decode(tokens).split("\n")[1])
        must_be(tokens, targets, encoded(record["prompt"], record["completion"]))
        assert segment % 2 == record["label"]
        assert segment < 3 or (segment + 1) // 2 == last + 1
        last = (segment + 1) // 2
    assert not by_prompt
    assert " preference: 40 answers (20 desirable, 20 undesirable), " in dataset.summary[0]
    assert dataset.preferences == ("labels",)


def test_pairs_that_exceed_a_row_are_left_out(tmp_path, encoded):
    fits = {"prompt": "q", "chosen": "a", "rejected": "b"}
    num_tokens = sum(len(encoded("q", said).ids) for said in "ab")
    empty, long = fits | {"rejected": " "}, fits | {"chosen": "aa bb"}
    source = source_of(tmp_path, [fits, long, long | {"prompt": "r"}, empty])
    dataset = prepared(chat_config(tmp_path, source, seq_len=num_tokens, objective="kto"))
    (line,) = dataset.summary
    assert " 3 pairs (1 with an empty answer skipped), " in line
    assert "; 1 rows, 100.00% full; " in line
    assert line.endswith(f"; 2 pairs left out, since they exceed {num_tokens} tokens")
    assert (dataset.train_row(0)["segment_ids"] > 0).all()
    message = (
        f"data.sources[0].paths: none of the pairs fits in the {num_tokens - 1} tokens of data.seq_len; raise it, or add"
        " shorter pairs"
    )
    assert refused(DataError, chat_config(tmp_path, source, seq_len=num_tokens - 1, objective="kto")) == message


@pytest.mark.usefixtures("tokenizer")
def test_a_source_of_both_kinds_is_refused(tmp_path):
    pairs = records(6)
    source = source_of(tmp_path, [*pairs[:2], *labelled(pairs[2:])])
    message = (
        "data.sources[0].paths: has 2 pairs and 4 single answers with a label; a source has one or the other: write them"
        " into two"
    )
    assert refused(DataError, chat_config(tmp_path, source, objective="kto")) == message


@pytest.mark.usefixtures("tokenizer")
def test_answers_to_one_prompt_are_on_one_side_of_the_split(tmp_path):
    pairs = [record | {"prompt": f"prompt {number % 30}"} for number, record in enumerate(records(60))]
    source = source_of(tmp_path, pairs)
    other = source_of(tmp_path, labelled(pairs), "labels.jsonl")
    dataset = prepared(
        chat_config(tmp_path, source, other, held_out_fraction=0.3, eval_batches=1, seq_len=256, objective="kto")
    )
    train = epoch(dataset, 2 * sum(num_rows(dataset, index) for index in range(2)))
    held_out = [dataset.held_out_rows[index] for index in range(len(dataset.held_out_rows))]
    prompts = [
        {dataset.tokenizer.decode(tokens).split("\n")[1] for _, _, tokens, _ in sequences(rows)}
        for rows in (train, held_out)
    ]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0] | prompts[1]) == 30
    assert 3 < len(prompts[1]) < 20


@pytest.mark.usefixtures("tokenizer")
def test_shards_continue_where_they_stopped_and_are_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
    monkeypatch.setattr(shards, "BATCH_BYTES", 300)
    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    config = chat_config(tmp_path, source_of(tmp_path, labelled(records(40))), seq_len=256, objective="kto")
    dataset = prepared(config)
    rows = epoch(dataset, num_rows(dataset))
    made = sorted(shard_files(tmp_path))
    assert len(made) > 3
    contents = [path.read_bytes() for path in made]
    made[-1].unlink()
    made[1].write_bytes(b"damaged")
    shutil.rmtree(tmp_path / "cache" / "index-1")
    again = prepared(config)
    assert again.fingerprint == dataset.fingerprint
    assert [path.read_bytes() for path in made] == contents
    np.testing.assert_equal(epoch(again, len(rows)), rows)
    assert again.summary == dataset.summary


def test_beside_other_sources(tmp_path, tokenizer):
    """Shards and keys of conversations stay as they are without preferences; a mixture says what each source has."""
    chat, _ = chat_source(tmp_path, "chat.jsonl", 20)
    text = jsonl_source(tmp_path, "text.jsonl", random_texts(50))
    alone = prepared(chat_config(tmp_path, text, chat))
    files = shard_files(tmp_path)
    log = []
    config = chat_config(tmp_path, text, chat)
    mixed = dataclasses.replace(config.data, sources=(*config.data.sources, source_of(tmp_path, records(20))))
    dataset = prepare(dataclasses.replace(config, data=mixed), log=log.append)
    assert dataset.preferences == (None, None, "pairs")
    assert dataset.summary[:2] == alone.summary
    assert files.items() <= shard_files(tmp_path).items()
    assert not [line for line in log if line.startswith("warning")]


def test_a_pair_is_shown_with_its_prompt_once(tmp_path, encoded):
    record = {"prompt": "Hi", "chosen": "Yo", "rejected": "No"}
    source = source_of(tmp_path, [record])
    example = find_example(prepared(chat_config(tmp_path, source, seq_len=128, objective="kto")))
    assert example is not None
    ids = [encoded("Hi", said) for said in ("Yo", "No")]
    assert example == (
        [
            Stretch("<s>### User\nHi\n\n### Assistant\n", False),
            Stretch("\n[chosen] ", False),
            Stretch("Yo</s>", True),
            Stretch("\n", False),
            Stretch("\n[rejected] ", False),
            Stretch("No</s>", True),
            Stretch("\n", False),
        ],
        sum(len(one.ids) for one in ids),
        sum(int(one.learnt.sum()) for one in ids),
        "pair",
    )
    source = source_of(tmp_path, [{"prompt": "Hi", "completion": "No", "label": False}], "label.jsonl")
    example = find_example(prepared(chat_config(tmp_path, source, seq_len=128, objective="kto")))
    assert example is not None
    assert example.what == "answer"
    assert [stretch.text for stretch in example.stretches][1:3] == ["\n[undesirable] ", "No</s>"]
