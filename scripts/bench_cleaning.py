"""Measures how fast cleaning is, and which seeded copies and near duplicates it finds.

    python scripts/bench_cleaning.py --documents 20000 --processes 2

Documents are stretches of 3,000 characters from the Python files below this interpreter's prefixes. A tenth of them occurs
twice, and another tenth has a copy with up to 30 words replaced, left out or doubled. Similarities are computed from words,
without hashes. Needs the extra `quality`.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from llamajax.config.cleaning import (
    CleaningConfig,
    DecontaminationConfig,
    FilterConfig,
    LanguageConfig,
    NearDuplicateConfig,
)
from llamajax.config.data import SourceConfig
from llamajax.data.cleaning.duplicates import digest_of
from llamajax.data.cleaning.pipeline import clean
from llamajax.data.cleaning.words import words_of
from llamajax.data.documents import file_groups
from llamajax.data.documents.sources import Source

CHARS = 3000
FILES = 8
NEAR = NearDuplicateConfig(enabled=True)
GOPHER = FilterConfig(
    min_words=50, max_words=100_000, min_mean_word_length=3.0, max_mean_word_length=10.0, max_symbols_per_word=0.1,
    max_ellipsis_lines=0.3, max_bullet_lines=0.9, min_alphabetic_words=0.8, max_repeated_lines=0.3,
    max_repeated_line_chars=0.2, max_repeated_paragraphs=0.3, max_repeated_paragraph_chars=0.2, repeated_ngrams=True,
    min_compression=1.2,
)  # fmt: skip
BINS = (0.8, 0.85, 0.9, 0.95, 1.01)


def stretches() -> Iterator[str]:
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            yield from (text[at : at + CHARS].strip() for at in range(0, len(text) - CHARS, CHARS))


def edited(text: str, draw: random.Random) -> str:
    words = text.split(" ")
    for _ in range(draw.randint(1, 30)):
        at = draw.randrange(len(words))
        words[at : at + 1] = draw.choice(([f"word{draw.randrange(10**6)}"], [], [words[at]] * 2)) or [""]
    return " ".join(words)


def runs_of(text: str) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[at : at + NEAR.ngram]) for at in range(max(len(words) - NEAR.ngram + 1, 1))}


def jaccard(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    return len(one & other) / max(len(one | other), 1)


def cleaned(folder: Path, name: str, config: CleaningConfig, pool: ProcessPoolExecutor) -> list[str]:
    """Returns the documents of the folder that stay."""
    source = Source(SourceConfig(kind="jsonl", paths=(f"{folder}/*.jsonl",)), "data.sources[0]")
    (left,) = clean(
        [source], [file_groups.group_files(source, folder / name, print)], config, folder / name, print, pool.map
    )
    return [document.text for document in left.documents(left.files())]


def told(documents: Sequence[str], near: Sequence[tuple[str, str]], left: set[str]) -> None:
    """Prints recall and precision."""
    sets = {text: runs_of(text) for text in documents}
    found = {(low, high): [0, 0] for low, high in itertools.pairwise(BINS)}
    for pair in near:
        similarity = jaccard(sets[pair[0]], sets[pair[1]])
        for (low, high), counts in found.items():
            if low <= similarity < high:
                counts[0] += 1
                counts[1] += not left.issuperset(pair)
    for (low, high), (num_pairs, num_found) in found.items():
        print(f"near       Jaccard {low:.2f} to {min(high, 1):.2f}: {num_found:,} of {num_pairs:,} pairs found")
    pairs, hits = (sum(counts) for counts in zip(*found.values(), strict=True))
    print(f"near       recall at 0.8 and above: {hits / pairs:.2%}")
    left_out = [text for text in sets if text not in left]
    partner = {one: other for pair in near for one, other in (pair, pair[::-1])}
    suspects = {text for text in left_out if jaccard(sets[text], sets.get(partner.get(text, ""), set())) < NEAR.threshold}
    holders: dict[tuple[str, ...], list[str]] = {}
    for text in suspects:
        for run in sets[text]:
            holders.setdefault(run, []).append(text)
    for text, runs in sets.items():  # some resemble a text that is not a seeded copy
        sharing = {suspect for run in runs for suspect in holders.get(run, ())} - {text}
        suspects -= {suspect for suspect in sharing if jaccard(runs, sets[suspect]) >= NEAR.threshold}
    print(f"near       precision: {1 - len(suspects) / max(len(left_out), 1):.2%} of {len(left_out):,} that were left out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    file_groups.GROUP_BYTES = 2**22  # makes several parts
    draw = random.Random(0)
    originals = list(dict.fromkeys(text for text, _ in zip(stretches(), range(options.documents), strict=False)))
    copies = draw.sample(originals, len(originals) // 10)
    near = [(text, edited(text, draw)) for text in draw.sample(originals, len(originals) // 10)]
    near = [(text, edit) for text, edit in near if digest_of(text) != digest_of(edit)]  # some edits undo each other
    documents = [*originals, *copies, *(edit for _, edit in near)]
    draw.shuffle(documents)
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool,
    ):
        folder = Path(name)
        for number in range(FILES):
            lines = (json.dumps({"text": text}) + "\n" for text in documents[number::FILES])
            (folder / f"{number}.jsonl").write_text("".join(lines))
        held_out = folder / "benchmark.txt"
        held_out.write_text("\n".join(originals[::100]))

        exact = cleaned(folder, "exact", CleaningConfig(exact_duplicates=True), pool)
        of_copies = len(documents) - len(set(documents))
        print(f"exact      {len(documents) - len(exact):,} left out, of {of_copies:,} copies; all others stay:"
              f" {set(exact) == set(documents)}")  # fmt: skip
        told(
            documents, near, set(cleaned(folder, "near", CleaningConfig(exact_duplicates=True, near_duplicates=NEAR), pool))
        )
        started = time.perf_counter()
        every = CleaningConfig(
            filters=GOPHER, languages=LanguageConfig(keep=("en",)), exact_duplicates=True, near_duplicates=NEAR,
            decontamination=DecontaminationConfig(paths=(str(held_out),)),
        )  # fmt: skip
        cleaned(folder, "all", every, pool)
        seconds = time.perf_counter() - started
        print(f"all steps  {len(documents) / seconds:,.0f} documents/s, {options.processes} processes")


if __name__ == "__main__":
    sys.exit(main())
