"""A tokenizer's files are kept under names by which they are found again, whatever their own are."""

import json
import shutil

import pytest

from llamajax.data.tokenizers.tokenizer import load_tokenizer
from tests.data.tokenizers.test_tokenizer import byte_level, trained


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (trained, "mistral.model"),
        (trained, "x.model.v3"),
        (trained, "pieces"),
        (byte_level, "mytok.json"),
        (byte_level, "tok"),
    ],
)
def test_files_of_any_name_are_found_where_they_are_kept(tmp_path, make, name):
    original = make(tmp_path)
    named = shutil.move(original.source, tmp_path / name)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|new|>": original.vocab_size}))
    tokenizer = load_tokenizer(tmp_path / name)
    assert tokenizer.source == named
    assert tokenizer.sha256 != original.sha256
    assert tokenizer.encode_template("a<|new|>").tolist() == [*original.encode_template("a"), original.vocab_size]
    kept = tmp_path / "kept"
    kept.mkdir()
    for file, content in tokenizer.files.items():
        (kept / file).write_bytes(content)
    again = load_tokenizer(kept)
    assert (again.sha256, again.files) == (tokenizer.sha256, tokenizer.files)
    assert again.source == kept / original.source.name
    assert (again.bos_id, again.eos_id) == (original.bos_id, original.eos_id)
