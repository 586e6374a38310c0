"""The order in which a process drives stages that run their own programs: 1F1B (PipeDream-Flush, arXiv:2006.09503)."""

from typing import NamedTuple


class Pass(NamedTuple):
    """A micro-batch's way through a stage."""

    stage: int
    micro_batch: int
    backward: bool
    """False: forward."""


def order_1f1b(stages: int, micro_batches: int) -> list[Pass]:
    """Returns all passes of a step in an order in which every pass follows those that it needs, the same in all processes.

    Stage s first runs the forward passes of p - 1 - s micro-batches, then a forward and a backward pass in turn, so that it
    never keeps the values of more than p - s micro-batches.
    """
    waiting = [_of_stage(stage, stages, micro_batches) for stage in range(stages)]
    done, order = set[Pass](), list[Pass]()
    while any(waiting):
        for passes in waiting:
            if passes and _needed(passes[0], stages) <= done:
                order.append(passes.pop(0))
                done.add(order[-1])
    return order


def _of_stage(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    first = min(stages - 1 - stage, micro_batches)
    passes = [Pass(stage, number, backward=False) for number in range(first)]
    for number in range(micro_batches):
        if first + number < micro_batches:
            passes.append(Pass(stage, first + number, backward=False))
        passes.append(Pass(stage, number, backward=True))
    return passes


def _needed(one: Pass, stages: int) -> set[Pass]:
    """Returns the passes with results that a pass needs."""
    stage, number, backward = one
    if not backward:
        return {Pass(stage - 1, number, backward=False)} if stage > 0 else set()
    if stage == stages - 1:
        return {Pass(stage, number, backward=False)}
    return {Pass(stage + 1, number, backward=True)}
