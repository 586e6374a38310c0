"""Real texts with seeded copies, as sources of files, cleaned; and what was left of them."""

import json
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from llamajax.config.cleaning import CleaningConfig
from llamajax.config.data import SourceConfig
from llamajax.data.cleaning.pipeline import clean
from llamajax.data.documents.file_groups import HashedGroup, group_files
from llamajax.data.documents.sources import Source
from llamajax.data.tasks import MapTasks


def real_texts(count: int, chars: int = 2000) -> list[str]:
    """Different stretches of the standard library's sources, a few hundred words each."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for path in sorted(root.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        found |= dict.fromkeys(text[at : at + chars].strip() for at in range(0, len(text) - chars, chars))
        if len(found) >= count:
            break
    return list(found)[:count]


def edited(text: str, num_edits: int, draw: random.Random) -> str:
    """The text with words replaced, left out, doubled, and put elsewhere."""
    words = text.split(" ")
    for _ in range(num_edits):
        at = draw.randrange(len(words))
        match draw.randrange(4):
            case 0:
                words[at] = f"word{draw.randrange(10**6)}"
            case 1 if len(words) > 1:
                del words[at]
            case 2:
                words.insert(at, words[at])
            case _:
                words.insert(draw.randrange(len(words)), words[at])
    return " ".join(words)


def jsonl(path: Path, texts: Sequence[str], **settings: object) -> SourceConfig:
    """A source of these texts, which are written to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return SourceConfig(kind="jsonl", paths=(str(path),), **settings)  # pyright: ignore[reportArgumentType]


def grouped(sources: Sequence[Source], cache_dir: Path) -> list[list[HashedGroup]]:
    return [group_files(source, cache_dir, print) for source in sources]


def run_clean(
    configs: Sequence[SourceConfig],
    config: CleaningConfig,
    cache_dir: Path,
    run: MapTasks = map,
    log: list[str] | None = None,
) -> list[Source]:
    """The cleaned sources."""
    sources = [Source(source, f"data.sources[{index}]") for index, source in enumerate(configs)]
    say = print if log is None else log.append
    return clean(sources, grouped(sources, cache_dir), config, cache_dir, say, run)


def texts_of(source: Source) -> list[str]:
    return [document.text for document in source.documents(source.files())]


def entry_of(cache_dir: Path) -> Path:
    """The one folder of cleaned documents."""
    (entry,) = (cache_dir / "cleaned-1").iterdir()
    return entry


def contents(cache_dir: Path) -> dict[str, bytes]:
    """Every file that cleaning left, by its name with the key."""
    folder = cache_dir / "cleaned-1"
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
