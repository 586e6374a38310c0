"""Preferences in published templates: both sequences are transformers' ids, and their answers are what is learnt."""

from pathlib import Path

import numpy as np
import pytest

from llamajax.config.conversations import ChatForm
from llamajax.data.chat.preference_tokens import encode_preference
from llamajax.data.documents.preferences import preference_of
from llamajax.errors import DataError
from tests.data.chat.published import SPECIAL, template
from tests.data.chat.talks import spelling
from tests.data.documents.preference_records import ASKED, BAD, GOOD, LABELLED, PAIRS, answer, user

LLAMA3 = (Path(__file__).parents[3] / "configs" / "chat_templates" / "llama3.jinja").read_text()
TEMPLATES = {"llama3": (LLAMA3, "{}<|eot_id|>"), "qwen3": (template("qwen3"), "<think>\n\n</think>\n\n{}<|im_end|>")}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return spelling(tmp_path_factory.mktemp("preferences"), SPECIAL)


def learnt_in(both, record, text):
    """Returns each side's text, and what of it is learnt; both None for a side that is missing."""
    ours, theirs, compiled = both
    found = []
    for ids, learnt in encode_preference(compiled(text), ours, preference_of(record, ChatForm())):
        assert (np.diff(np.flatnonzero(learnt)) == 1).all()
        found.append((theirs.decode(ids), theirs.decode(ids[learnt])) if len(ids) else (None, None))
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_both_sequences_are_what_transformers_writes(both, name):
    text, written = TEMPLATES[name]
    assert text is not None
    _, theirs, _ = both
    for record in PAIRS.values():
        for said, (sequence, learnt) in zip((GOOD, BAD), learnt_in(both, record, text), strict=True):
            talk = [user(ASKED), answer(said)]
            assert sequence == theirs.apply_chat_template(talk, chat_template=text, tokenize=False)
            assert learnt == written.format(said)
            prompt = theirs.apply_chat_template(talk[:1], chat_template=text, tokenize=False, add_generation_prompt=True)
            assert sequence.startswith(prompt)
    for record in LABELLED.values():
        chosen, (_, learnt) = learnt_in(both, record, text)
        assert chosen == (None, None)
        assert learnt == written.format(BAD)


def test_a_template_that_drops_earlier_thoughts_has_one_sequence_a_side(both):
    """The last answer's, behind the prompt as it is served."""
    text = TEMPLATES["qwen3"][0]
    thought = {"role": "assistant", "content": "One.", "reasoning_content": "I count."}
    prompt = [user("1?"), thought, user("2?")]
    last = [thought | {"content": said} for said in ("Two.", "Three.")]
    found = learnt_in(both, {"prompt": prompt, "chosen": last[:1], "rejected": last[1:]}, text)
    for (sequence, learnt), said in zip(found, ("Two.", "Three."), strict=True):
        assert sequence.count("I count.") == 1
        assert learnt == f"<think>\nI count.\n</think>\n\n{said}<|im_end|>"
    record = {"prompt": "1?", "chosen": [thought, user("2?"), *last[:1]], "rejected": [thought, user("2?"), *last[1:]]}
    with pytest.raises(DataError, match=r"some.jinja: chat template: changes earlier turns of an answer once it continues"):
        learnt_in(both, record, text)


def test_answers_that_the_template_writes_alike_are_refused(both):
    record = PAIRS["trl, texts"] | {"rejected": f"{GOOD} "}
    with pytest.raises(DataError, match=r"chat template: writes both answers alike, so neither is better; remove the line$"):
        learnt_in(both, record, LLAMA3)
