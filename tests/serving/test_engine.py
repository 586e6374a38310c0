"""The engine alone: the same tokens on every mesh, shared beginnings, long prompts that stop nobody, ends."""

import functools
import random

import jax
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.generation.completion import Completer, TextStream
from llamajax.generation.sampling import Sampling
from llamajax.parallel.mesh import make_mesh
from llamajax.serving.engine import Engine
from llamajax.serving.sequences import Continuation, Event
from tests.serving.served import MAX_SEQ_LEN, make_engine, tiny_model
from tests.tiny import single_device_mesh

V = 325
pytestmark = pytest.mark.slow  # test_app.py has an engine every day


class Ids:
    """A tokenizer whose tokens are characters."""

    vocab_size = V

    def decode(self, ids):
        return "".join(chr(1000 + int(token)) for token in ids)


def work(prompt, limit, events=None, **settings) -> Continuation:
    stream = TextStream(Ids(), prompt, settings.pop("stop", ()))  # pyright: ignore[reportArgumentType]
    taken: list[Event] = [] if events is None else events
    return Continuation(prompt=prompt, limit=limit, stream=stream, tell=taken.append, **settings)


def finish(engine: Engine) -> None:
    for _ in range(1000):
        if not engine.is_busy:
            return
        engine.step()
    raise AssertionError("the engine does not end")


def tokens_of(events: list[Event]) -> list[int]:
    return [score.token for event in events for score in event.scores]


@functools.cache
def engine_on(mesh: str, *, experts: bool = False, **changes) -> Engine:
    jax.set_mesh(make_mesh(MESHES[mesh]) if mesh != "one device" else single_device_mesh())
    return make_engine(tiny_model(WITH_EXPERTS if experts else {}), V, **changes)


WITH_EXPERTS = {"model.experts.num_experts": 8, "model.experts.top_k": 3, "model.experts.mlp_dim": 16}
MESHES = {
    "mixed": MeshConfig(fsdp=2, sequence=2, tensor=2),
    "replicas": MeshConfig(data=4, tensor=2),
    "sequence": MeshConfig(fsdp=1, sequence=8),
    "experts": MeshConfig(fsdp=2, expert=2, tensor=2),
}


def mixed_works() -> list[tuple[Continuation, list[Event]]]:
    draw, works = random.Random(1), []
    system = [draw.randrange(3, 300) for _ in range(40)]
    for number in range(24):
        prompt = (system if number % 2 else []) + [draw.randrange(3, 300) for _ in range(draw.randrange(1, 40))]
        sampling = Sampling() if number % 3 else Sampling(temperature=1.0, top_k=[None, 9][number % 2], top_p=0.9)
        events: list[Event] = []
        settings = {"sampling": sampling, "seed": 5, "num_top": [None, 2][number % 4 == 0], "scores_prompt": number % 8 == 0}
        works.append((work(prompt, draw.randrange(0 if number % 8 == 0 else 1, 16), events, **settings), events))
    return works


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_writes_what_one_device_writes(mesh):
    """Greedy and drawn tokens, their log probabilities, and scores of prompts."""
    found = {}
    for name in ("one device", mesh):
        engine, works = engine_on(name, experts=mesh == "experts"), mixed_works()
        jax.set_mesh(engine.mesh)
        for number, (each, _) in enumerate(works):
            engine.submit(each)
            if number % 4 == 0:
                engine.step()
        finish(engine)
        assert all(events[-1].finish_reason for _, events in works)
        found[name] = [events for _, events in works]
        assert engine.totals.shared_tokens > 100
    for ours, theirs in zip(found[mesh], found["one device"], strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        for kind in ("scores", "prompt_scores"):
            a, b = ([s.logprob for event in events for s in getattr(event, kind)] for events in (ours, theirs))
            np.testing.assert_allclose(a[1:], b[1:], atol=1e-4)


def test_what_is_shared_is_read_once_and_long_prompts_stop_nobody():
    """Of three sequences with one beginning the first reads it and the others copy it; a fourth goes on, a token a step."""
    engine = engine_on("one device")
    jax.set_mesh(engine.mesh)
    assert len(engine.slots) == 4
    short: list[Event] = []
    engine.submit(work([3], 60, short))
    engine.step()
    engine.step()
    system, several = list(range(10, 80)), [[], [], []]
    for number, events in enumerate(several):
        engine.submit(work([*system, 100 + number], 10, events))
    before, written = engine.totals.shared_tokens, len(short)
    for step in range(1, 4):  # 71 tokens in parts of 32
        engine.step()
        assert len(short) == written + step
    assert engine.totals.shared_tokens == before
    finish(engine)
    assert engine.totals.shared_tokens == before + 2 * len(system)
    settings = {"sampling": Sampling(), "key": jax.random.key(0), "max_seq_len": MAX_SEQ_LEN, "end_ids": ()}
    completer = Completer(engine._model, Ids(), **settings)  # pyright: ignore[reportArgumentType]
    pieces = completer.complete([[*system, 100 + number] for number in range(3)], max_tokens=10, batch_size=3)
    wanted = [list(piece.completion.tokens) for piece in pieces if piece.completion]
    assert [tokens_of(events) for events in several] == wanted
    # A conversation goes on in its own slot, without a copy.
    shared, again = engine.totals.shared_tokens, [*system, 100, *wanted[0], 7]
    engine.submit(work(again, 1))
    finish(engine)
    assert engine.totals.shared_tokens == shared + len(again) - 2  # its last token was never read


def test_what_is_cancelled_frees_its_place_and_says_nothing_more():
    engine = engine_on("one device")
    jax.set_mesh(engine.mesh)
    events: list[list[Event]] = [[] for _ in range(6)]
    works = [work([20 + number], 50, each) for number, each in enumerate(events)]
    for each in works:
        engine.submit(each)
    for _ in range(4):
        engine.step()
    assert (engine.num_running, len(engine.waiting)) == (4, 2)
    for number in (0, 5):
        engine.cancel(works[number])
    said = len(events[0])
    finish(engine)
    assert len(events[0]) == said > 0
    assert events[5] == []
    assert [len(tokens_of(each)) for each in events[1:5]] == [50] * 4
    engine.cancel(works[1])  # ended already


def test_a_slot_can_be_filled_to_its_last_token():
    engine = engine_on("one device")
    jax.set_mesh(engine.mesh)
    for prompt, limit in (([5] * (MAX_SEQ_LEN - 3), 3), ([6] * MAX_SEQ_LEN, 0), ([7] * (MAX_SEQ_LEN - 1), 1)):
        events: list[Event] = []
        engine.submit(work(prompt, limit, events, num_top=0, scores_prompt=True))
        finish(engine)
        assert len(tokens_of(events)) == limit
        assert sum(len(event.prompt_scores) for event in events) == len(prompt)
        assert events[-1].finish_reason == "length"
