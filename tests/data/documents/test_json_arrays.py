"""An array's elements are those of the json module, wherever the blocks that it is read in end."""

import io
import json
import random

import pytest

from llamajax.data.documents import json_arrays
from llamajax.data.documents.json_arrays import BrokenArrayError, array_elements

PIECES = ["a", '"q"', "\\", "[{", "x\ny", '\\"', "äö😀", "},", "", "]"]


def drawn(rng, depth=0):
    kind = rng.choice("sslond"[depth > 3 :]) if depth < 4 else "s"
    if kind == "l":
        return [drawn(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == "d":
        return {rng.choice(PIECES): drawn(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(PIECES) * rng.randrange(4) if kind == "s" else rng.choice([1, None, True, -2.5])


@pytest.mark.parametrize("block", [1, 2, 7, 64, 2**20])
def test_elements_are_those_of_the_array(block, monkeypatch):
    monkeypatch.setattr(json_arrays, "READ_BYTES", block)
    rng = random.Random(block)
    for _ in range(200):
        array = [drawn(rng) for _ in range(rng.randrange(6))]
        text = json.dumps(array, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
        text = rng.choice([b"", b" \n\n"]) + text + rng.choice([b"", b"\r\n "])
        elements = list(array_elements(io.BytesIO(text), 10**6))
        assert [json.loads(element.text) for element in elements] == array
        assert [element.number for element in elements] == list(range(1, len(array) + 1))
        at = 0
        for element in elements:
            at = text.index(element.text, at)
            assert element.line == text.count(b"\n", 0, at) + 1
            at += len(element.text)
        for cut in range(text.index(b"[") + 1, text.rindex(b"]") + 1, 1 + len(text) // 9):
            with pytest.raises(BrokenArrayError, match="the file ends before its array does"):
                list(array_elements(io.BytesIO(text[:cut]), 10**6))
        with pytest.raises(BrokenArrayError, match="the file continues after its array"):
            list(array_elements(io.BytesIO(text + b"\n\n,"), 10**6))


@pytest.mark.parametrize("block", [1, 5, 2**20])
def test_of_an_element_that_is_too_long_the_beginning_is_kept(block, monkeypatch):
    monkeypatch.setattr(json_arrays, "READ_BYTES", block)
    text = b'[\n"aa",\n"' + b'b\\"' * 30 + b'", [[1,\n2],\n' + b"3," * 50 + b'4],\n"dd"\n]'
    elements = list(array_elements(io.BytesIO(text), 8))
    assert [(element.line, element.number) for element in elements] == [(2, 1), (3, 2), (3, 3), (6, 4)]
    assert [len(element.text) > 8 for element in elements] == [False, True, True, False]
    assert max(len(element.text) for element in elements) <= 9
    assert elements[0].text == b'"aa"'
    assert elements[3].text == b'"dd"'
