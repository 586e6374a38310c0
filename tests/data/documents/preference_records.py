"""Preferences in the forms of public data sets, written by hand."""

from typing import Any


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


ASKED, GOOD, BAD = "How many moons has Mars?", "Two: Phobos and Deimos.", "Mars has one moon."

PAIRS: dict[str, dict[str, Any]] = {
    "trl, texts": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "trl, messages": {"prompt": [user(ASKED)], "chosen": [answer(GOOD)], "rejected": [answer(BAD)]},
    "trl, without a prompt": {"chosen": [user(ASKED), answer(GOOD)], "rejected": [user(ASKED), answer(BAD)]},
    "ultrafeedback_binarized": {
        "prompt": ASKED,
        "prompt_id": "3f1c",
        "chosen": [user(ASKED), answer(GOOD)],
        "rejected": [user(ASKED), answer(BAD)],
        "messages": [user(ASKED), answer(GOOD)],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    },
    "hh-rlhf": {
        "chosen": f"\n\nHuman: {ASKED}\n\nAssistant: {GOOD}",
        "rejected": f"\n\nHuman: {ASKED}\n\nAssistant: {BAD}",
    },
    "hh-rlhf with its prompt apart": {
        "prompt": f"\n\nHuman: {ASKED}\n\nAssistant:",
        "chosen": f"\n\nHuman: {ASKED}\n\nAssistant: {GOOD}",
        "rejected": f"\n\nHuman: {ASKED}\n\nAssistant: {BAD}",
    },
    "dpo_en_demo of LLaMA-Factory": {
        "conversations": [{"from": "human", "value": ASKED}],
        "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
    },
    "alpaca": {"instruction": ASKED, "input": "", "chosen": GOOD, "rejected": BAD},
}
"""Pairs, each of them `ASKED`, `GOOD` and `BAD`."""

LABELLED: dict[str, dict[str, Any]] = {
    "trl, texts": {"prompt": ASKED, "completion": BAD, "label": False},
    "kto-mix-14k": {"prompt": [user(ASKED)], "completion": [answer(BAD)], "label": False},
    "kto_en_demo of LLaMA-Factory": {"messages": [user(ASKED), answer(BAD)], "label": False},
    "sharegpt": {
        "conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": BAD}],
        "kto_tag": False,
    },
    "alpaca": {"instruction": ASKED, "output": BAD, "kto_tag": False},
}
"""Answers with a label, each of them `ASKED` and `BAD`."""
