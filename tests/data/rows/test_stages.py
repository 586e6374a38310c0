"""Mixtures that change: every stage in its own proportions, sources that go on, epochs that are counted and bounded."""

import collections
import math
from fractions import Fraction
from typing import Any

import pytest

from llamajax.config.batch_ramp import BatchRampConfig
from llamajax.config.data import SourceConfig, Stage, StageConfig, TokenizerConfig
from llamajax.config.training import TrainConfig
from llamajax.data.rows.dataset import prepare
from llamajax.data.rows.loader import Loader
from llamajax.data.rows.order import Proportions, training_order
from llamajax.data.rows.position import PassedOver, next_row
from llamajax.data.rows.stages import Passes, stage_orders, takes_part
from llamajax.errors import ConfigError, DataError
from tests.data.rows.test_dataset import config_for, jsonl_source, letters_tokenizer, random_texts

SHORT, LONG = 16, 64
BATCH = 8


def rows_after(step):
    return step * BATCH


def stage(from_step, *weights, seq_len=SHORT):
    return Stage(from_step=from_step, weights=weights, seq_len=seq_len, name="")


def sources(*sizes):
    """Rows that say of which source they are, and which."""
    return [[(source, row) for row in range(size)] for source, size in enumerate(sizes)]


def taken(orders, stages, num_steps) -> list[list[Any]]:
    """The rows of each stage of a run."""
    ends = [*(stage.from_step for stage in stages[1:]), num_steps]
    return [
        [order[position] for position in range(stage.from_step * BATCH, end * BATCH)]
        for order, stage, end in zip(orders, stages, ends, strict=True)
    ]


def test_a_run_without_stages_reads_what_it_always_did():
    rows = sources(40, 90)
    (order,) = stage_orders([stage(0, 3.0, 1.0)], {SHORT: rows}, 7, rows_after)
    before = training_order(rows, [3.0, 1.0], 7)
    assert [order[position] for position in range(500)] == [before[position] for position in range(500)]


def test_a_source_goes_on_where_the_stages_before_left_it():
    """However often weights change, what a source gives is its one endless order, in rows of the same length."""
    stages = [stage(0, 1.0, 0.0, 0.2), stage(3, 0.5, 0.5, 0.0), stage(9, 0.1, 0.7, 0.3), stage(10, 0.0, 1.0, 0.0)]
    rows = sources(30, 100, 7)
    orders = stage_orders(stages, {SHORT: rows}, 5, rows_after)
    read = [row for of_stage in taken(orders, stages, 25) for row in of_stage]
    for source in range(3):
        alone = training_order(rows, [float(source == other) for other in range(3)], 5)
        own = [row for row in read if row[0] == source]
        assert own == [alone[number] for number in range(len(own))]
    assert [row[0] for row in read].count(0) > len(rows[0]), "also into its second epoch"


def test_every_stage_has_its_own_proportions_from_its_first_row():
    stages = [stage(0, 1.0, 0.0), stage(4, 0.25, 0.75), stage(12, 3.0, 1.0)]
    orders = stage_orders(stages, {SHORT: sources(1000, 1000)}, 0, rows_after)
    counts = [collections.Counter(source for source, _ in rows) for rows in taken(orders, stages, 20)]
    assert counts == [{0: 32}, {0: 16, 1: 48}, {0: 48, 1: 16}]


def test_rows_of_another_length_begin_a_pass_of_their_own_and_the_old_ones_go_on_later():
    stages = [stage(0, 1.0), stage(3, 1.0, seq_len=LONG), stage(5, 1.0), stage(7, 1.0, seq_len=LONG)]
    short, long = sources(100), [[("long", row) for row in range(100)]]
    first, second, third, fourth = taken(stage_orders(stages, {SHORT: short, LONG: long}, 1, rows_after), stages, 9)
    alone = training_order(short, [1.0], 1)
    assert first + third == [alone[number] for number in range(40)]
    assert {name for name, _ in second + fourth} == {"long"}
    assert len({*second, *fourth}) == 32, "no row twice within a pass"
    assert [row for _, row in second] != [row for _, row in first[: len(second)]], "nor in the order of the short ones"


def test_counts_are_those_of_the_order():
    for weights in ((1.0,), (0.7, 0.3), (0.0, 2.0, 1.0), (1.0, 0.0), (0.001, 1.0, 0.0)):
        proportions = Proportions(weights)
        seen = collections.Counter()
        for position in range(500):
            assert proportions.counts(position) == [seen[source] for source in range(len(weights))]
            seen[proportions[position][0]] += 1


def test_passes_are_those_of_the_order_at_every_step():
    stages = (stage(0, 1.0, 0.0), stage(3, 0.3, 0.7), stage(8, 0.5, 0.5, seq_len=LONG))
    rows = {SHORT: sources(20, 50), LONG: sources(11, 13)}
    passes = Passes(stages, {length: list(map(len, own)) for length, own in rows.items()}, rows_after)
    assert passes.after(0) == [0.0, 0.0]
    for step in range(1, 15):
        begun = [of for of in stages if of.from_step < step]
        read = taken(stage_orders(begun, rows, 0, rows_after), begun, step)
        expected = [
            sum(
                sum(row[0] == source for row in own) / len(rows[of.seq_len][source])
                for own, of in zip(read, begun, strict=True)
            )
            for source in range(2)
        ]
        assert passes.after(step) == pytest.approx(expected, abs=1e-12)


def test_rows_that_were_passed_over_count_for_the_stage_that_they_were_passed_over_in():
    stages = (stage(0, 1.0, 0.0), stage(3, 0.0, 1.0))
    passes = Passes(stages, {SHORT: [100, 100]}, rows_after)
    across = [PassedOver(after_step=2, first_row=16, num_rows=24, reason="step 5: bad", time=0.0)]
    assert passes.after(2, across) == [0.16, 0.0]
    assert passes.after(3, across) == [0.48, 0.0]
    assert passes.after(4, across) == [0.48, 0.08]
    later = [*across, PassedOver(after_step=3, first_row=48, num_rows=16, reason="step 5: bad", time=0.0)]
    assert passes.after(3, later) == [0.48, 0.0]
    assert passes.after(4, later) == [0.48, 0.24]


def test_a_stage_that_rows_were_passed_over_before_leaves_out_as_many_of_its_own():
    """With unchanged weights that is nothing lost and nothing twice."""
    stages = [stage(0, 0.5, 0.5), stage(3, 0.5, 0.5)]
    first, second = stage_orders(stages, {SHORT: sources(100, 100)}, 0, rows_after)
    across = [PassedOver(after_step=2, first_row=16, num_rows=24, reason="step 5: bad", time=0.0)]
    firsts = [next_row(step, rows_after, across) for step in range(6)]
    assert firsts == [0, 8, 40, 48, 56, 64]
    read = [first[position] for at in firsts[:3] for position in range(at, at + BATCH)]
    read += [second[position] for at in firsts[3:] for position in range(at, at + BATCH)]
    (straight,) = stage_orders(stages[:1], {SHORT: sources(100, 100)}, 0, rows_after)
    assert read == [straight[position] for at in firsts for position in range(at, at + BATCH)]


@pytest.mark.parametrize(
    ("num_epochs", "rows", "batch", "steps"),
    [(3.0, 111, 4, 84), (2.5, 111, 4, 70), (2.5, 8, 4, 5), (0.1, 3, 64, 1), (0.3, 10, 1, 3)],
)
def test_epochs_are_the_fewest_steps_that_read_so_often(num_epochs, rows, batch, steps):
    assert steps == math.ceil(Fraction(str(num_epochs)) * rows / batch)
    passes = Passes((stage(0, 1.0, 1.0, 0.0),), {SHORT: [rows - 1, 1, 1000]}, lambda step: batch * step)
    assert passes.num_steps(num_epochs) == steps


def test_epochs_of_a_run_with_a_ramp_and_stages_add_up():
    ramp = BatchRampConfig(start=4, increment=4, sequences=40)
    run = TrainConfig(num_epochs=2.0, global_batch_size=8, grad_accum_steps=2, global_batch_ramp=ramp)
    stages = (stage(0, 1.0, 1.0), stage(6, 0.0, 1.0, seq_len=LONG))
    passes = Passes(stages, {SHORT: [30, 70], LONG: [10, 20]}, run.rows_after)
    steps, before = passes.num_steps(2.0), run.rows_after(6)

    def read(steps):
        return before / 100 + (run.rows_after(steps) - before) / 20

    assert read(steps) >= 2.0 > read(steps - 1)


CAPPED = SourceConfig(kind="stdlib", max_epochs=2.0)


@pytest.mark.parametrize(
    ("stages", "num_rows", "message"),
    [
        (
            [stage(0, 1.0, 1.0)],
            100,
            "the 4 epochs that the run's 100 steps would make through it; lower its weight to at most 0.333,",
        ),
        ([stage(0, 1.0, 1.0)], 100, "lower train.num_steps to at most 50 or raise it"),
        (
            [stage(0, 1.0, 0.0)],
            300,
            "the 2.667 epochs that the run's 100 steps would make through it; lower train.num_steps to at",
        ),
        (
            [stage(0, 1.0, 3.0), stage(50, 1.0, 1.0)],
            100,
            "the 3 epochs that the run's 100 steps would make through it; lower its weights to at most 0.532 of their"
            " values,",
        ),
        ([stage(0, 1.0, 0.0)], 1, "the 800 epochs that the run's 100 steps would make through it; raise it"),
    ],
)
def test_a_source_that_would_be_gone_through_too_often_is_refused_with_what_helps(stages, num_rows, message):
    passes = Passes(tuple(stages), {SHORT: [num_rows, 10_000]}, rows_after)
    with pytest.raises(ConfigError) as caught:
        passes.check([CAPPED, SourceConfig(kind="stdlib")], 100)
    assert str(caught.value).startswith("data.sources.0.max_epochs: 2 is below ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_helps_does():
    sources = [CAPPED, SourceConfig(kind="stdlib")]
    for weight, num_steps in ((0.333, 100), (1.0, 50)):
        Passes((stage(0, weight, 1.0),), {SHORT: [100, 10_000]}, rows_after).check(sources, num_steps)
    for weight, num_steps in ((0.335, 100), (1.0, 51)):
        with pytest.raises(ConfigError):
            Passes((stage(0, weight, 1.0),), {SHORT: [100, 10_000]}, rows_after).check(sources, num_steps)


@pytest.fixture
def staged(tmp_path):
    """A run of two sources that changes weights after two steps of 32 rows, and to rows four times as long after four."""
    letters_tokenizer(tmp_path)
    of_a = jsonl_source(tmp_path, "a.jsonl", ["a" * (1 + n % 40) for n in range(1500)])
    of_b = jsonl_source(tmp_path, "b.jsonl", ["b" * (1 + n % 40) for n in range(700)], weight=0.0)
    stages = StageConfig(from_step=2, weights=(0.25, 0.75)), StageConfig(from_step=4, seq_len=LONG)
    return config_for(tmp_path, of_a, of_b, held_out_fraction=0.1, stages=stages)


def prepared(config):
    return prepare(config, log=lambda line: None)


def test_batches_follow_the_stages_also_ahead_of_time(staged):
    dataset = prepared(staged)
    letter_a = dataset.tokenizer.encode_batch(["a"])[0][0]
    with Loader(dataset, staged.changed({"data.prefetch_steps": 3}), start_step=0) as loader:
        batches = [next(loader)[1]["tokens"] for _ in range(6)]
    assert [batch.shape[-1] for batch in batches] == [SHORT] * 4 + [LONG] * 2
    assert [int((batch == letter_a).any(-1).sum()) for batch in batches] == [32, 32, 8, 8, 8, 8]
    for start in (1, 2, 3, 4, 5):
        with Loader(dataset, staged, start_step=start) as loader:
            assert (next(loader)[1]["tokens"] == batches[start]).all()


def test_a_window_that_was_passed_over_across_a_boundary_keeps_steps_in_their_stages(staged):
    dataset = prepared(staged)
    across = [PassedOver(after_step=3, first_row=96, num_rows=64, reason="step 5: bad", time=0.0)]
    with Loader(dataset, staged, 3, across) as loader:
        read = [next(loader)[1]["tokens"] for _ in range(2)]
    assert [batch.shape[-1] for batch in read] == [SHORT, LONG]
    for batch, number, first in ((read[0], 1, 160), (read[1], 2, 192)):
        rows = dataset.of_stage(number)
        expected = [rows.train_row(position)["tokens"].tolist() for position in range(first, first + 32)]
        assert batch[0].tolist() == expected


def test_held_out_rows_have_the_length_of_the_stage_and_the_same_documents(staged):
    dataset = prepared(staged)
    texts = []
    for number, length in enumerate((SHORT, SHORT, LONG)):
        rows = dataset.of_stage(number).held_out_rows
        assert {row["tokens"].shape for row in (rows[index] for index in range(len(rows)))} == {(length,)}
        targets = [row["targets"][row["segment_ids"] > 0].tolist() for row in (rows[index] for index in range(len(rows)))]
        texts.append(sorted(token for row in targets for token in row))
    assert texts[0] == texts[1] == texts[2]


def test_fingerprints_follow_what_each_stage_reads(staged):
    before = prepared(staged)
    alone = prepared(staged.changed({"data.stages": (), "data.sources.1.weight": 1.0}))
    assert alone.stage_fingerprints == ()
    assert [step for step, _ in before.stage_fingerprints] == [2, 4]
    changed = {
        "data.stages.1.seq_len": 2 * SHORT, "data.stages.1.from_step": 5, "data.stages.0.weights": (0.5, 0.5),
        "data.sources.0.weight": 0.5, "data.sources.1.weight": 0.5,
    }  # fmt: skip
    same = {"data.stages.0.name": "mid", "data.stages.0.weights": (1.0, 3.0), "seed": 3, "data.sources.0.weight": 7.0}

    def fingerprints(changes):
        dataset = prepared(staged.changed(changes))
        return [dataset.fingerprint, *(own for _, own in dataset.stage_fingerprints)]

    found = {key: fingerprints({key: value}) for key, value in changed.items()}
    own = fingerprints({})
    assert {key: [a == b for a, b in zip(other, own, strict=True)] for key, other in found.items()} == {
        "data.stages.1.seq_len": [True, True, False], "data.stages.1.from_step": [True, True, False],
        "data.stages.0.weights": [True, False, False], "data.sources.0.weight": [True, True, True],
        "data.sources.1.weight": [False, False, False],
    }  # fmt: skip
    assert all(fingerprints({key: value}) == own for key, value in same.items())


def test_a_source_needs_rows_only_of_lengths_that_it_is_read_in(staged, tmp_path):
    stages = [stage(0, 1.0, 0.0), stage(3, 1.0, 1.0, seq_len=LONG), stage(5, 0.0, 1.0, seq_len=LONG)]
    assert [takes_part(stages, source, length) for source in (0, 1) for length in (SHORT, LONG)] == [True, True, False, True]
    orders = stage_orders(stages, {SHORT: sources(5, 0), LONG: sources(5, 5)}, 0, rows_after)
    assert {source for source, _ in taken(orders, stages, 7)[0]} == {0}
    empty = jsonl_source(tmp_path, "empty.jsonl", ["", ""], weight=0.0)
    with pytest.raises(DataError, match=r"data.sources\[1\].paths: has no document to train on"):
        prepared(staged.changed({"data.sources": (staged.data.sources[0], empty)}))


def test_the_summary_tells_of_every_length_of_rows(staged):
    lines = prepared(staged).summary
    assert [line.split()[1] for line in lines] == ["data.sources[0]", "data.sources[1]"] * 2
    assert f"in rows of {LONG} tokens: " in lines[2]


def test_other_tokenizers_and_caches_do_not_matter_to_stages(tmp_path):
    texts = random_texts(60)
    config = config_for(
        tmp_path, jsonl_source(tmp_path, "a.jsonl", texts), tokenizer=TokenizerConfig(), vocab_size=300,
        stages=(StageConfig(from_step=3, seq_len=32),),
    )  # fmt: skip
    first, second = prepared(config), prepared(config)
    assert [first.of_stage(1).train_row(96)["tokens"].shape, first.train_row(0)["tokens"].shape] == [(32,), (16,)]
    assert (first.content, first.stage_fingerprints) == (second.content, second.stage_fingerprints)
