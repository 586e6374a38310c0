"""Planted runs of words of held-out texts are found, one word fewer is not."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from llamajax.config.cleaning import CleaningConfig, DecontaminationConfig
from llamajax.data.cleaning.contamination import HeldOut, held_out_groups, read_held_out, write_runs
from llamajax.data.cleaning.words import words_of
from llamajax.errors import DataError
from tests.data.cleaning.cleaned import entry_of, jsonl, real_texts, run_clean, texts_of

QUESTION = "Which of the two trains, leaving A at 9:15 and B at 10 o'clock, arrives first in the city of C, and when?"
WORDS = words_of(QUESTION)


def held_out(tmp_path: Path, *texts: str, **settings: object) -> HeldOut:
    path = tmp_path / "benchmark.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DecontaminationConfig(paths=(str(path),), **settings)  # pyright: ignore[reportArgumentType]
    runs_path = tmp_path / f"{len(list(tmp_path.iterdir()))}.runs"
    write_runs(runs_path, held_out_groups(config, tmp_path / "cache", print), config.ngram)
    return read_held_out(runs_path, config)


def runs_of(text: str) -> set[tuple[str, ...]]:
    """All 13 words in a row."""
    words = words_of(text)
    return {tuple(words[at : at + 13]) for at in range(len(words) - 12)}


def test_a_run_is_found_and_one_word_less_is_not(tmp_path):
    runs = held_out(tmp_path, QUESTION)
    around = "Exercise for the holidays", "Hint: draw a picture."
    for start in range(len(WORDS) - 12):
        planted = " ".join(WORDS[start : start + 13])
        num_runs, num_hits, first = runs.hits(f"{around[0]} {planted} {around[1]}")
        assert (num_runs, num_hits, first) == (13 + 8 - 12, 1, planted)
        shorter = " ".join(WORDS[start : start + 12])
        assert runs.hits(f"{around[0]} {shorter} {around[1]}")[1] == 0
    assert runs.hits(QUESTION.upper().replace(" ", "\n - "))[:2] == (len(WORDS) - 12, len(WORDS) - 12)
    assert runs.hits("") == (0, 0, "")


def test_hits_and_their_share_condemn_together(tmp_path):
    runs = held_out(tmp_path, QUESTION, ngram=5, min_hits=2, min_share=0.5)
    assert [runs.condemns(4, hits) for hits in (1, 2, 3)] == [False, True, True]
    assert [runs.condemns(6, hits) for hits in (2, 3)] == [False, True]
    assert [runs.condemns(*runs.hits(" ".join(WORDS[:count]))[:2]) for count in (5, 6)] == [False, True]


def test_texts_and_several_fields_are_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("one two three four five")
    (tmp_path / "b.jsonl").write_text(json.dumps({"question": "six seven eight nine ten", "answer": "a b c d e"}) + "\n")
    (tmp_path / "c.json").write_text(json.dumps([{"question": "in an array it was", "answer": ""}], indent=2))
    config = DecontaminationConfig(paths=(f"{tmp_path}/*.*",), text_keys=("question", "answer"), ngram=5)
    write_runs(tmp_path / "runs", held_out_groups(config, tmp_path / "cache", print), 5)
    runs = read_held_out(tmp_path / "runs", config)
    assert [runs.hits(text)[1] for text in ("One, two, three, four, five.", "six seven eight nine ten", "a b c d e")] == [
        1
    ] * 3
    assert runs.hits("in an array it was")[1] == 1
    with pytest.raises(DataError, match=r"b.jsonl:1: data.cleaning.decontamination.text_key: has no 'text', only"):
        write_runs(tmp_path / "x", held_out_groups(DecontaminationConfig(paths=config.paths), tmp_path / "c", print), 5)


def test_documents_with_planted_runs_are_left_out_and_no_others(tmp_path):
    texts = real_texts(60)
    benchmark = [text[:2000] for text in list(topics.values())[:30]]
    planted = {index: " ".join(words_of(benchmark[index])[20 : 33 + index % 2]) for index in range(0, 30, 3)}
    documents = [
        f"{text[:700]}\n{planted[index]}\n{text[700:]}" if index in planted else text for index, text in enumerate(texts)
    ]
    held_out_runs = {run for text in benchmark for run in runs_of(text)}
    condemned = [index for index, text in enumerate(documents) if not held_out_runs.isdisjoint(runs_of(text))]
    assert set(condemned) >= set(planted)
    jsonl(tmp_path / "benchmark.jsonl", [*benchmark, "too short to be found"])
    config = CleaningConfig(decontamination=DecontaminationConfig(paths=(f"{tmp_path}/benchmark.jsonl",)))
    log: list[str] = []
    source = jsonl(tmp_path / "documents.jsonl", documents)
    (cleaned,) = run_clean([source], config, tmp_path / "cache", log=log)
    assert texts_of(cleaned) == [text for index, text in enumerate(documents) if index not in condemned]
    assert any("1 of 31 held-out texts have fewer than 13 words" in line for line in log)
    told = json.loads((entry_of(tmp_path / "cache") / "report.json").read_text())
    assert told["removed"]["decontamination.paths"][0] == len(condemned)
    where, text, why = told["examples"]["decontamination.paths"][0]
    assert where == "data.sources[0], document 1 of documents.jsonl"
    assert documents[0].startswith(text)
    assert planted[0] in why

    jsonl(tmp_path / "benchmark.jsonl", ["nothing that anybody wrote"])
    (cleaned,) = run_clean([source], config, tmp_path / "cache")
    assert texts_of(cleaned) == documents, "other held-out texts under the same name make other documents"
