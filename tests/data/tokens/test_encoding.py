"""A tokenizer that is trained on the run's documents: what is told meanwhile, and what its memory is checked by."""

import re

import pytest

from llamajax.config.data import TokenizerConfig
from llamajax.data import progress
from llamajax.data.documents.file_groups import group_files
from llamajax.data.documents.sources import Source
from llamajax.data.tokenizers.tokenizer import sample_texts, train_sentencepiece
from llamajax.data.tokens import encoding
from llamajax.data.tokens.encoding import tokenizer_for
from llamajax.errors import DataError
from tests.data.rows.test_dataset import config_for, jsonl_source, random_texts

TEXTS = random_texts(200)


@pytest.fixture
def train(tmp_path):
    """Trains on `TEXTS` with a bound in bytes, and returns the model and what was told."""
    source = jsonl_source(tmp_path, "a.jsonl", TEXTS)

    def train(max_bytes=10**6):
        config = config_for(tmp_path, source, tokenizer=TokenizerConfig(train_max_bytes=max_bytes), vocab_size=300)
        groups, log = group_files(Source(source, "data.sources[0]"), tmp_path / "cache", print), []
        return tokenizer_for(config, None, groups, tmp_path / "cache", log.append), log

    return train


@pytest.mark.parametrize("max_bytes", [10**6, 5000])
def test_the_sample_is_told_and_shown(train, monkeypatch, max_bytes):
    monkeypatch.setattr(progress, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(encoding, "_TOLD_BYTES", 1)
    tokenizer, log = train(max_bytes)
    size = sum(map(len, TEXTS))
    cut = max_bytes < size
    sample = sample_texts(TEXTS, max_bytes)
    assert tokenizer.files["tokenizer.model"] == train_sentencepiece(sample, vocab_size=300)
    sampling = [line for line in log if line.startswith("sampling")]
    assert len(sampling) >= len(TEXTS)
    assert re.fullmatch(r"sampling   100%, [\d,]+ documents/s, [\d.]+ MB/s, 0 s left", sampling[-1])
    expected = f"{sum(map(len, sample)) / 1e6:,.1f} {f'of {size / 1e6:,.1f} ' * cut}MB of text"
    assert f"tokenizer  training 300 pieces on {expected}" in log
    assert log[-1].startswith(f"tokenizer  training 300 pieces on {expected}: done in ")


def test_a_sample_beyond_the_memory_is_refused_before_it_is_read(train, monkeypatch):
    monkeypatch.setattr(encoding, "_TOLD_BYTES", 1)
    monkeypatch.setattr(encoding, "free_memory", lambda: 4000)
    with pytest.raises(DataError) as caught:
        train()
    assert re.fullmatch(
        r"data.tokenizer.train_max_bytes: training a tokenizer on 0.0 MB of text takes at least 0.0 GB of memory, but"
        r" only 0.0 GB are free; set it to 500 or less, or use a machine with more",
        str(caught.value),
    )
    monkeypatch.setattr(encoding, "free_memory", lambda: None)
    train()
