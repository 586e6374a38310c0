"""The whole pipeline: the same bytes whoever works at it and in which order, killed at any write, damaged, or short of
packages; and what training makes of it."""

import contextlib
import importlib.util
import json
import multiprocessing
import random
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from llamajax import disk
from llamajax.config.cleaning import (
    CleaningConfig,
    DecontaminationConfig,
    FilterConfig,
    LanguageConfig,
    NearDuplicateConfig,
)
from llamajax.config.data import DataConfig, SourceConfig, TokenizerConfig
from llamajax.data import progress
from llamajax.data.cleaning import pipeline, scan, write
from llamajax.data.documents import file_groups
from llamajax.data.rows.dataset import Dataset, prepare
from llamajax.data.tokenizers.tokenizer import train_sentencepiece
from llamajax.errors import ConfigError, DataError, EnvironmentMismatchError
from tests import runs
from tests.data.cleaning.cleaned import contents, edited, entry_of, jsonl, real_texts, run_clean, texts_of
from tests.data.cleaning.test_language import ARTICLE_1
from tests.tiny import tiny_config


def all_steps(folder: Path) -> CleaningConfig:
    return CleaningConfig(
        filters=FilterConfig(min_words=20, max_repeated_lines=0.5),
        languages=LanguageConfig(keep=("en",)),
        decontamination=DecontaminationConfig(paths=(str(folder / "benchmark.jsonl"),)),
        exact_duplicates=True,
        near_duplicates=NearDuplicateConfig(enabled=True, num_permutations=32),
        max_examples=3,
    )


def mixed_sources(folder: Path, chars: int = 2000) -> list[SourceConfig]:
    """Two sources with something for every step: text files, and JSONL in several files."""
    draw, texts, num_files = random.Random(5), real_texts(150, chars), 4
    benchmark = texts[140:]
    texts = [
        *texts[:100],
        *(edited(text, 4, draw) for text in texts[:40]),
        *texts[100:130],
        *texts[100:120],
        *(f"{text}\n{benchmark[at][:900]}" for at, text in enumerate(texts[130:140])),
        *(f"{text}\n{text}" for text in ARTICLE_1.values()),
        *["too short"] * 3,
        "All work and no play makes Jack a dull boy.\n" * 9,
        "",
    ]
    draw.shuffle(texts)
    jsonl(folder / "benchmark.jsonl", benchmark)
    (folder / "texts").mkdir()
    for at, text in enumerate(texts[:60]):
        (folder / "texts" / f"{at:03d}.txt").write_text(text)
    rest = texts[60:]
    for number in range(num_files):
        jsonl(
            folder / "lines" / f"{number}.jsonl",
            rest[number * len(rest) // num_files : (number + 1) * len(rest) // num_files],
        )
    return [
        SourceConfig(kind="text", paths=(f"{folder}/texts/*.txt",), weight=2.0),
        SourceConfig(kind="jsonl", paths=(f"{folder}/lines/*.jsonl",)),
    ]


def shuffled(function, tasks):
    order = random.Random(len(tasks)).sample(range(len(tasks)), len(tasks))
    return [function(tasks[at]) for at in order]


def test_every_step_takes_something_and_counts_it(tmp_path):
    sources, log = mixed_sources(tmp_path), []
    cleaned = run_clean(sources, all_steps(tmp_path), tmp_path / "cache", log=log)
    left = [texts_of(source) for source in cleaned]
    told = json.loads((entry_of(tmp_path / "cache") / "report.json").read_text())
    assert set(told["removed"]) == {
        "filters.min_words", "filters.max_repeated_lines", "languages.keep", "languages.min_probability",
        "decontamination.paths", "exact_duplicates", "near_duplicates",
    }  # fmt: skip
    assert told["before"][0] == told["left"][0] + sum(documents for documents, _ in told["removed"].values())
    assert told["left"] == [len([*left[0], *left[1]]), sum(len(text.encode()) for text in [*left[0], *left[1]])]
    assert told["after"]["near_duplicates"] == told["left"]
    assert sum(source["empty"] for source in told["sources"]) == 1
    for number, source in enumerate(told["sources"]):
        assert source["key"] == f"data.sources[{number}]"
        assert source["left"][0] == len(left[number])
    assert [(source.key, source.config.weight) for source in cleaned] == [("data.sources[0]", 2.0), ("data.sources[1]", 1.0)]
    assert {len(found) for found in told["examples"].values()} <= {1, 2, 3}
    steps = [line for line in log if line.startswith("cleaned    ") and "documents stay" in line]
    assert [line.split()[1] for line in steps] == [f"{step}:" for step in [*told["steps"], "all"]]
    assert all("documents/s per core" in line for line in steps[:-1])
    page = entry_of(tmp_path / "cache") / "report.html"
    assert page.is_file()
    assert log[-1] == f"cleaned    report: {page}"


def test_the_same_bytes_in_any_order_and_by_any_process(tmp_path, monkeypatch):
    monkeypatch.setattr(file_groups, "GROUP_BYTES", 40_000)
    sources, config = mixed_sources(tmp_path), all_steps(tmp_path)
    run_clean(sources, config, tmp_path / "a")
    expected = contents(tmp_path / "a")
    assert sum(name.endswith(".zst") for name in expected) > 4
    run_clean(sources, config, tmp_path / "b", shuffled)
    assert contents(tmp_path / "b") == expected
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        run_clean(sources, config, tmp_path / "c", pool.map)
    assert contents(tmp_path / "c") == expected
    log: list[str] = []
    run_clean(sources, config, tmp_path / "a", log=log)
    assert contents(tmp_path / "a") == expected
    assert not [line for line in log if line.startswith("cleaning")], "done once"


def test_the_same_documents_in_one_part_or_many(tmp_path, monkeypatch):
    sources, config = mixed_sources(tmp_path), all_steps(tmp_path)
    expected = [texts_of(source) for source in run_clean(sources, config, tmp_path / "one")]
    monkeypatch.setattr(file_groups, "GROUP_BYTES", 10_000)
    monkeypatch.setattr(scan, "CHUNK_DOCUMENTS", 7)
    monkeypatch.setattr(write, "FILE_BYTES", 5_000)
    assert [texts_of(source) for source in run_clean(sources, config, tmp_path / "many")] == expected
    assert len(contents(tmp_path / "many")) > 3 * len(contents(tmp_path / "one"))


KILLED = """
import os, signal, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")  # jax warns of forks, where it has no threads yet
from llamajax.data.documents import file_groups
from llamajax.data.cleaning import language, scan
from tests.data.cleaning.cleaned import contents, run_clean
from tests.data.cleaning.test_pipeline import all_steps, mixed_sources

folder, stride = Path(sys.argv[1]), int(sys.argv[2])
file_groups.GROUP_BYTES, scan.CHUNK_DOCUMENTS = 40_000, 50
sources, config = mixed_sources(folder, chars=500), all_steps(folder)
language.known_languages()
count = 0


def run(cache_dir, kill_at):
    # In a process of its own, killed when it has written so many files or folders; its exit status. What it wrote
    # outlives it in the kernel, so nobody waits for the disk.
    def counted(descriptor):
        global count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        os.fsync = counted
        run_clean(sources, config, cache_dir, log=[])
        os._exit(0)
    return os.waitpid(child, 0)[1]


assert run(folder / "whole", 0) == 0
expected = contents(folder / "whole")
kill_at, killed_in = 1, set()
while True:
    cache_dir = folder / f"killed-{kill_at}"
    status = run(cache_dir, kill_at)
    if status == 0:
        break
    assert status == signal.SIGKILL, status
    left = sorted(path.suffix or path.name for path in cache_dir.glob("cleaned-1/*/*"))
    killed_in |= {name for name in left if name not in (".tmp", "lock")}
    assert run(cache_dir, 0) == 0
    assert contents(cache_dir) == expected, kill_at
    kill_at += stride * (4 if kill_at > 30 else 1)
print(kill_at, *sorted(killed_in))
"""


@pytest.mark.parametrize("stride", [pytest.param(7, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
def test_killed_at_any_write_it_ends_with_the_same_bytes(tmp_path, stride):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(stride)]
    outcome = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    num_kills, *seen = outcome.stdout.split()
    assert int(num_kills) > 40
    assert {".scan", "copies", ".pairs", "candidates", ".sets", "decisions", ".zst", ".written", ".html"} <= set(seen)


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_what_is_damaged_is_named_and_made_again(tmp_path, monkeypatch):
    sources, config, cache_dir = mixed_sources(tmp_path), all_steps(tmp_path), tmp_path / "cache"
    run_clean(sources, config, cache_dir)
    expected = contents(cache_dir)
    damaged = sorted(entry_of(cache_dir).glob("*.zst"))[1]
    for damage in (flip, Path.unlink):
        damage(damaged)
        log: list[str] = []
        run_clean(sources, config, cache_dir, log=log)
        assert contents(cache_dir) == expected
        assert f"damaged    {damaged}; rebuilding it" in log

    flipped = []

    def flips_one(function, tasks):
        yield from map(function, tasks)
        if function is scan.scan and not flipped:
            path = next((tmp_path / "other" / "cleaned-1").glob("*/*.scan"))
            flip(path, -100)
            flipped.append(path)

    log = []
    run_clean(sources, config, tmp_path / "other", flips_one, log=log)
    assert contents(tmp_path / "other") == expected
    assert f"damaged    {flipped[0]}; rebuilding it" in log


def test_whoever_comes_second_waits_and_gets_the_same(tmp_path, monkeypatch):
    source, config, log = jsonl(tmp_path / "a.jsonl", ["one", "one", "two"]), CleaningConfig(exact_duplicates=True), []
    run_clean([source], config, tmp_path / "cache")
    entry = entry_of(tmp_path / "cache")
    monkeypatch.setattr(pipeline, "POLL_S", 0.01)
    holder = contextlib.ExitStack()
    holder.enter_context(disk.locked(entry))
    threading.Timer(0.3, holder.close).start()
    before = progress.signs()
    (cleaned,) = run_clean([source], config, tmp_path / "cache", log=log)
    assert texts_of(cleaned) == ["one", "two"]
    assert log[0] == "waiting    for another process to clean the same documents"
    assert sum(line.startswith("waiting") for line in log) == 1
    assert progress.signs() > before


def test_a_missing_package_is_told_and_only_where_it_is_needed(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", real_texts(5))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "rensa", None)
    monkeypatch.setitem(sys.modules, "py3langid", None)
    near, languages = NearDuplicateConfig(enabled=True), LanguageConfig(keep=("en",))
    with pytest.raises(EnvironmentMismatchError) as error_info:
        run_clean([source], CleaningConfig(near_duplicates=near, languages=languages), tmp_path / "cache")
    assert str(error_info.value).splitlines() == [
        "data.cleaning.languages.keep: py3langid is not installed; run pip install 'llamajax[quality]', or turn it off",
        "data.cleaning.near_duplicates.enabled: rensa is not installed; run pip install 'llamajax[quality]', or turn it off",
    ]
    config = CleaningConfig(filters=FilterConfig(min_words=1), exact_duplicates=True)
    (cleaned,) = run_clean([source], config, tmp_path / "cache")
    assert len(texts_of(cleaned)) == 5


def test_conversations_pass_untouched_and_without_steps_everything_does(tmp_path):
    chat = SourceConfig(kind="chat", paths=(str(tmp_path / "chat.jsonl"),))
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    text = jsonl(tmp_path / "a.jsonl", ["one", "one", "two"])
    cleaned = run_clean([chat, text], CleaningConfig(exact_duplicates=True), tmp_path / "cache")
    assert cleaned[0].config == chat
    assert texts_of(cleaned[1]) == ["one", "two"]
    for sources, config in (([chat], CleaningConfig(exact_duplicates=True)), ([chat, text], CleaningConfig())):
        assert [source.config for source in run_clean(sources, config, tmp_path / "none")] == sources
    assert not (tmp_path / "none" / "cleaned-1").exists()


def test_documents_that_are_cut_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("llamajax.data.documents.formats.MAX_DOCUMENT_CHARS", 100)
    for module in ("texts", "pipeline"):
        monkeypatch.setattr(f"llamajax.data.cleaning.{module}.MAX_TEXT_CHARS", 250)
    long = "".join(f"line {number}\n" for number in range(100))
    source = jsonl(tmp_path / "a.jsonl", ["short", long, long + "another end", "a line\n" * 30])
    note = "note       data.sources[0]: 2 documents are longer than 250 characters; data.cleaning splits them"
    for _ in range(2):  # it is in the report
        log: list[str] = []
        (cleaned,) = run_clean([source], CleaningConfig(exact_duplicates=True), tmp_path / "cache", log=log)
        assert [line for line in log if line.startswith("note")] == [note]
        assert len(texts_of(cleaned)) > 4


def test_bad_records_are_left_out_as_far_as_the_source_allows(tmp_path):
    text = jsonl(tmp_path / "a.jsonl", ["one", "two"], max_bad_records=1)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{]\n")
    log: list[str] = []
    (cleaned,) = run_clean([text], CleaningConfig(exact_duplicates=True), tmp_path / "cache", log=log)
    assert texts_of(cleaned) == ["one", "two"]
    assert cleaned.config.max_bad_records == 0
    assert any(line.startswith("left out   data.sources[0]: 1 bad records, the first one") for line in log)
    strict = SourceConfig(kind="jsonl", paths=text.paths)
    with pytest.raises(DataError, match=r"a.jsonl:3: data.sources.0..paths: is not JSON"):
        run_clean([strict], CleaningConfig(exact_duplicates=True), tmp_path / "cache")


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (CleaningConfig(filters=FilterConfig(min_words=99)), DataError,
         "data.sources.0..paths: data.cleaning leaves none of its 2 documents; see .*report.html and loosen the rule"),
        (CleaningConfig(languages=LanguageConfig(keep=("english",))), ConfigError,
         "data.cleaning.languages.keep: py3langid does not support english; choose from .*en, "),
        (CleaningConfig(filters=FilterConfig(bad_words="no/such/file")), DataError,
         "data.cleaning.filters.bad_words: no/such/file: cannot be read: No such file"),
        (CleaningConfig(decontamination=DecontaminationConfig(paths=("no/such/*.txt",))), DataError,
         "data.cleaning.decontamination.paths: 'no/such/.*' matches no file"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, config, error, message):
    with pytest.raises(error, match=message) as error_info:
        run_clean([jsonl(tmp_path / "a.jsonl", ["one", "two"])], config, tmp_path / "cache")
    assert len(str(error_info.value).splitlines()) == 1


def test_a_byte_order_mark_is_no_part_of_a_bad_word(tmp_path):
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbfrude\nbad\n")
    config = CleaningConfig(filters=FilterConfig(bad_words=str(tmp_path / "words.txt")))
    (left,) = run_clean([jsonl(tmp_path / "a.jsonl", ["one rude", "two"])], config, tmp_path / "cache")
    assert texts_of(left) == ["two"]


def test_lines_that_c4_drops_are_gone_before_copies_are_looked_for(tmp_path):
    prose = "This is a sentence of prose. This is another one."
    texts = [f"Home | About\n{prose}", f"{prose}\nContact", "Home | About"]
    config = CleaningConfig(filters=FilterConfig(c4_lines=True), exact_duplicates=True)
    (cleaned,) = run_clean([jsonl(tmp_path / "a.jsonl", texts)], config, tmp_path / "cache")
    assert texts_of(cleaned) == [prose]
    told = json.loads((entry_of(tmp_path / "cache") / "report.json").read_text())
    assert told["removed"] == {"exact_duplicates": [1, len(prose)], "filters.c4_lines": [1, len(texts[2])]}
    assert told["sources"][0]["cut"] == [2, len("Home | About\n") + len("\nContact")]
    where = "data.sources[0], document {} of a.jsonl"
    assert told["cut"] == [[1.0, where.format(at + 1), texts[at], "what stays", prose] for at in range(2)]
    assert "<mark>Home | About" in (entry_of(tmp_path / "cache") / "report.html").read_text().replace("</mark><mark>", "")


def test_a_run_learns_what_stays_and_knows_its_rows_by_it(tmp_path):
    texts = [*real_texts(40, 400), *real_texts(40, 400)[:20]]
    (tmp_path / "letters.model").write_bytes(train_sentencepiece(texts, vocab_size=400))

    def prepared(cleaning: CleaningConfig, name: str, texts: list[str]) -> Dataset:
        of_run = DataConfig(
            sources=(jsonl(tmp_path / name, texts),), cleaning=cleaning, seq_len=16, cache_dir=str(tmp_path / "cache"),
            held_out_fraction=0.0, tokenizer=TokenizerConfig(path=str(tmp_path / "letters.model")),
        )  # fmt: skip
        config = tiny_config(data=of_run).changed({"model.vocab_size": 512, "train.eval_batches": 0})
        return prepare(config, log=lambda line: None)

    plain = prepared(CleaningConfig(), "a.jsonl", texts)
    cleaned = prepared(CleaningConfig(exact_duplicates=True), "a.jsonl", texts)
    by_hand = prepared(CleaningConfig(), "b.jsonl", texts[:40])
    assert cleaned.summary == by_hand.summary
    assert cleaned.summary != plain.summary
    assert len({plain.fingerprint, cleaned.fingerprint, by_hand.fingerprint}) == 3
    assert prepared(CleaningConfig(exact_duplicates=True), "a.jsonl", texts).fingerprint == cleaned.fingerprint
    assert prepared(CleaningConfig(max_examples=9), "a.jsonl", texts).fingerprint == plain.fingerprint
    for position in range(30):
        row, expected = cleaned.train_row(position), by_hand.train_row(position)
        assert all((row[name] == expected[name]).all() for name in expected)
