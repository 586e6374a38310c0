"""Reward functions from a user's file: how they are called, what they may return, and one line for every mistake."""

import asyncio
import re

import numpy as np
import pytest

from llamajax.errors import ConfigError, DataError
from llamajax.training.rewards import Scored, load_rewards, rewards_of

SCORED = Scored(
    prompts=["2 + 2 = ", [{"role": "user", "content": "3 + 3?"}]],
    completions=["4", [{"role": "assistant", "content": "seven"}]],
    completion_ids=[[5, 2], [8, 9, 2]],
    records=[{"prompt": "2 + 2 = ", "answer": "4", "level": 1}, {"messages": [], "answer": "6"}],
)


def write(folder, text):
    path = folder / "rewards.py"
    path.write_text(text)
    return path


def test_functions_are_called_as_trl_calls_them(tmp_path):
    """A call passes lists by name: all completions at once, and the fields of their records."""
    (tmp_path / "beside.py").write_text("LIMIT = 3\n")
    path = write(
        tmp_path,
        """
from dataclasses import dataclass
from beside import LIMIT

@dataclass
class Told:
    text: str

def correct(prompts, completions, answer, **others):
    assert set(others) == {"completion_ids", "level"} | {"prompt", "messages"}, others
    texts = [Told(c if isinstance(c, str) else c[0]["content"]).text for c in completions]
    return [float(text == right) for text, right in zip(texts, answer)]

def short(completion_ids):
    return [len(ids) < LIMIT for ids in completion_ids]

def easy(level, bonus=0.5):
    return [None if own is None else bonus for own in level]

REWARDS = {correct: 1.0, short: 0.25, easy: 2}
""",
    )
    rewards = load_rewards(path)
    assert rewards.described == "correct, 0.25 x short, 2 x easy"
    of_functions = rewards.of(SCORED)
    np.testing.assert_array_equal(of_functions, [[1, 1, 0.5], [0, 0, np.nan]])
    np.testing.assert_array_equal(rewards.total(of_functions), [2.25, 0])


def test_functions_may_wait_even_where_a_loop_runs():
    async def judged(completions: list) -> list[float]:
        await asyncio.sleep(0)
        return [0.5] * len(completions)

    async def in_a_notebook() -> np.ndarray:
        return rewards_of(judged).of(SCORED)

    np.testing.assert_array_equal(asyncio.run(in_a_notebook()), [[0.5], [0.5]])


def test_functions_that_fail_while_they_wait_are_told(tmp_path):
    path = write(tmp_path, "async def f(completions):\n    return [1 / 0]\nREWARDS = [f]\n")
    with pytest.raises(DataError, match=r"rewards\.py:2: f failed: ZeroDivisionError: division by zero; correct it"):
        load_rewards(path).of(SCORED)


def test_what_a_function_changes_is_its_own():
    """Neither the next function nor the step sees it."""

    def clears(completions: list, completion_ids: list[list[int]]) -> list[int]:
        values = [len(ids) for ids in completion_ids]
        completion_ids[0].clear()
        completions.clear()
        return values

    def counts(completions: list, completion_ids: list[list[int]]) -> list[int]:
        return [len(ids) for ids in completion_ids]

    of_functions = rewards_of([clears, counts]).of(SCORED)
    np.testing.assert_array_equal(of_functions[:, 0], of_functions[:, 1])
    assert all(SCORED.completion_ids)


def test_functions_of_a_program_need_no_file():
    rewards = rewards_of([lambda completions: [1] * len(completions)])
    np.testing.assert_array_equal(rewards.total(rewards.of(SCORED)), [1, 1])
    assert rewards_of(rewards_of).names == ["rewards_of"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("REWARDS = [", r"rewards\.py:1: SyntaxError: '\[' was never closed .*; correct the file"),
        (
            "x = 1\nimport nothing_of_this_name\n",
            r"rewards\.py:2: ModuleNotFoundError: No module .*; correct the file",
        ),
        (
            "def f(): pass\n",
            r"rewards\.py: REWARDS must be functions, not None; end the file with REWARDS",
        ),
        ("import sys\nsys.exit()\n", r"rewards\.py:2: SystemExit: *; correct the file"),
        ("REWARDS = []\n", r"rewards\.py: REWARDS must be functions, not \[\];"),
        ("REWARDS = ['f']\n", r"rewards\.py: REWARDS must be functions, not \['f'\];"),
        ("def f(): pass\nREWARDS = {f: 'much'}\n", r"rewards\.py: the weight 'much' in REWARDS is no number;"),
        ("def f(): pass\ng = f\ndef f(): pass\nREWARDS = [f, g]\n", r"two functions in REWARDS are called f; rename one"),
    ],
)
def test_a_file_without_functions_is_told(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load_rewards(write(tmp_path, text))
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"--rewards {tmp_path}/rewards.py: there is no such file; name a")):
        load_rewards(tmp_path / "rewards.py")
    (tmp_path / "rewards.txt").write_text("")
    with pytest.raises(ConfigError, match=r"rewards\.txt: is no Python file; its name must end in \.py"):
        load_rewards(tmp_path / "rewards.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def f(completions):\n    return [1 / 0]\n",
            r"rewards\.py:2: f failed: ZeroDivisionError: division by zero; correct it",
        ),
        ("def f(completions):\n    exit(3)\n", r"rewards\.py:2: f failed: SystemExit: 3; correct it"),
        ("def f(completions): return [1]\n", r"rewards\.py: f: returned 1 rewards for 2 completions; return one for each"),
        ("def f(completions): return ['a', 'b']\n", r"rewards\.py: f: returned 'a', which is no finite number"),
        ("def f(completions): return [0, float('nan')]\n", r"rewards\.py: f: returned nan, which is no finite number"),
        ("def f(completions): return 1.0\n", r"rewards\.py: f: returned 1\.0, which is no list; return a list of numbers"),
        (
            "def f(solution): return [0, 0]\n",
            r"rewards\.py: f: asks for 'solution', which no record has; records have answer, ",
        ),
        ("def f(completions):\n    raise KeyError('a\\nb')\n", r"rewards\.py:2: f failed: KeyError: 'a\\nb'; correct it"),
    ],
)
def test_a_function_that_fails_is_told_with_its_line(tmp_path, text, message):
    rewards = load_rewards(write(tmp_path, f"{text}REWARDS = [f]\n"))
    with pytest.raises(DataError, match=message) as raised:
        rewards.of(SCORED)
    assert "\n" not in str(raised.value)
