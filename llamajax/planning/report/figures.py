"""A plan in figures: the object that `python -m llamajax.plan --json` writes (`schema_version` 2; keys may be added, but
none changes its meaning within a version).

Bytes, FLOPs and seconds are per step and device unless noted otherwise; shares are between 0 and 1.

- `schema_version`, `llamajax`, `jax_version`; `compiled`: false if XLA's compiler for GPUs is missing. Then `missing` says
  so, `memory_estimate` (bytes by kind, `peak_bytes`, `host`, `fits`; by formulas) replaces the compiler's figures, and of
  the other keys only those from formulas are present.
- The run: `run`, `gpu`, `nodes`, `gpus_per_node`, `num_devices`, `mesh` (axis: size), `num_params`, `tokens_per_step` (of
  all devices), `num_active_params` (those that process one token), `model_flops` (of all devices, causal, by active
  parameters, without recomputation), `experts` (see `expert_figures`; null without experts), `zero_minimum_bytes` (weights
  and moments, evenly over all devices that can share them), `least_wire_bytes` (see `estimates.communication`),
  `checkpoint_bytes` (one checkpoint of all devices: weights and moments).
- `forms`: the chosen form for each setting of `parallel`, and why; likewise the kernel for `attention`, and for `matmuls`
  those in float8, if any. `warning`: attention's kernel is not fused, or null. `remarks`: assumptions about such GPUs, one
  line each.
- `calibration`: null, or the `file` of measured constants, the `device`, `date`, `commit` and `jax` of their measurement,
  and the `constants` that differ from the built-in ones, by name: `built_in` and `measured`.
- `accuracy`: results of known runs on such GPUs, or null: `by` (`published` ones, or those `measured` with the constants of
  `calibration`), the number of `runs`, how many of them are `within` the reported range (of published ones all but a tenth
  at each end), and the speed relative to the predicted one, minus one, of the slowest and the fastest of these (`least`,
  `most`).
- `options`: options that the compiler received. `latency_profile`: `auto` for the cost model's latencies, the file, or null
  for none, also where `auto` would not help. `num_compilations`; `compile_s`: total of all of them.
- The schedule that training runs: `capacity_bytes`, `fits`, `argument_bytes`, `temp_bytes`, `peak_bytes`, `host_bytes`,
  `allowance_bytes` (besides XLA's arrays), `num_communicators` (of NCCL, in this program), `memory` (bytes by kind at the
  peak), `memory_fraction` (the least XLA_PYTHON_CLIENT_MEM_FRACTION), `training_memory_fraction` (training's value of it),
  `peak_tensors` (name, kind, dtype, shape, bytes of one, count); `step_time_s`, `compute_s` and `compute_by_kind`,
  `elementwise_bytes` (read and written by kernels without matrix products), `num_kernels`, `slowdown_s` (of compute, by
  simultaneous collectives), `comm_s`, `exposed_comm_s`, `exposed_copy_s`, `exposed_fraction` (of the step); `wire_bytes` and
  `wire_bytes_by_link` (sent), `wire_bytes_factor` (relative to the least; null if that is zero);
  `tokens_per_sec_per_device`, `mfu` (causal attention), `mfu_full_attention`, `hfu` (of the executed FLOPs), `flops`
  (executed, without `idle_flops`, which stages of a pipeline compute without a micro-batch and nothing uses),
  `rematerialized_flops` (the part that XLA recomputes to save memory), `flops_factor` (the others relative to the formula
  with `model.remat`), `attention_kernel` (`cudnn`, `pallas`, `triton`, `tokamax`, `plain`); `pipeline`: null, or `layers`
  and `slots` of a device, the number of `ticks` that fill the pipeline, run both passes and drain it, the seconds of one of
  each in `tick_s` (null if unknown), `bubble` (the passes in which a stage waits, relative to those in which it works) and
  `bytes_per_tick` (sent to the next stage, and to the previous one); `sync_collectives_in_loops`; `not_understood`
  (instructions with a guessed cost); `collectives` (name, kind, axis, group_size, num_nodes, link, bytes, count, seconds,
  hidden_s, exposed_s, is_sync, in_loop).
- `without_profile`: the same group for the schedule with XLA's built-in estimates; `with_profile`: for the schedule with
  latencies, or null.
- `alternatives`, with other settings: `changes`, `peak_bytes`, `fits`, `step_time_s`, `exposed_comm_s`, `exposed_fraction`,
  `sync_collectives_in_loops`. `best_changes`: the changes, among all compiled programs, that fit and are fastest.
- `by_remat`, where `model.remat` is `auto`: for each policy the share `recomputed` of the FLOPs, `peak_bytes`, `host_bytes`,
  `fits`, `step_time_s`, `mfu`, `elementwise_bytes`, `num_kernels`, scheduled with XLA's built-in estimates.
  `by_remat_on_card`: the same with all saved values on the card, for the policies with some in host memory.
- `host`, null where nothing waits in host memory: `bytes` of a device, `bytes_per_node`, `node_memory_bytes` (null if
  unknown), `bandwidth` (bytes per second, each way) of a link and the `gpus_per_link` that share it, `copies` (bytes by
  direction), `exposed_copy_s` (of waiting for these copies); `choices`, those that `offload: auto` compared by formulas,
  each with the share of the `state` and the `values` in host memory, the `fraction` of tokens whose values are saved,
  `card_bytes` and `host_bytes`, seconds of a layer's copies each way (`copy_s`) and of a layer in both passes
  (`layers_s`), `fits` and `is_chosen`; and what they share: `forward_s` of a layer, `copy_bandwidth`, `card_room_bytes`
  for saved values and `host_room_bytes`; and `disk`, null without `offload.tiers.nvme_dir`: `bytes` of a device's file,
  `written_bytes` of a step, the `layers` whose values wait there, and `bandwidth` (null if unknown).
- `suggestions`, where it does not fit: `changes`, `peak_bytes`, `fits`, `step_time_s`, `step_time_ratio` (relative to this
  plan's), `gpu_time_ratio` (the same times devices), `flops_ratio`. All were compiled; the cheapest comes first.
- `ramp`, null without `train.global_batch_ramp`: its `phases`, the `steps`, `tokens` and `days` until the batch is full, and
  `budget_days`, the days of the token budget with the ramp. All other figures are those of the full batch. A smaller step
  takes time in proportion to its micro-batches, plus those in which stages of a pipeline wait.
- `token_budget`, `days`, `price_per_billion_tokens`, `price` (null without `hardware.price_per_gpu_hour`).
- `domains`, only where `hardware.domains` names some: for each `name`, `network`, `nodes`, `node_bandwidth`, the
  `step_time_s` if its network joined the nodes of all domains, and the `layers` of its stages in proportion to the speeds.
- `sweep`: `key` and `rows`, each with the `value`, `num_devices`, `efficiency` (tokens per second and device relative to the
  first row's) and the figures above except lists and `without_profile`; null if no sweep was requested.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import llamajax
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import Remat
from llamajax.config.run import Config
from llamajax.estimates.calibration import read_measurement
from llamajax.estimates.communication import least_wire_bytes, pipeline_bytes
from llamajax.estimates.formulas import (
    mean_keys,
    mesh_sizes,
    minimum_state_bytes,
    num_active_params,
    num_params,
    state_bytes,
)
from llamajax.estimates.gpus import planned_gpu
from llamajax.estimates.machine import planned_machine
from llamajax.estimates.pipeline import StageWork
from llamajax.estimates.training_flops import training_flops_per_token
from llamajax.planning.cost.accuracy import accuracy
from llamajax.planning.cost.flops import planned_flops
from llamajax.planning.cost.kernels import compiled_attention
from llamajax.planning.cost.network import num_communicators
from llamajax.planning.cost.remarks import remarks
from llamajax.planning.cost.timeline import CollectiveUse, tick_loops
from llamajax.planning.domains import speeds_of_domains
from llamajax.planning.memory import estimate
from llamajax.planning.plan import Alternative, Plan, Schedule
from llamajax.planning.report.experts import expert_figures
from llamajax.planning.report.host_memory import host_figures
from llamajax.planning.schedule_choice import FASTEST
from llamajax.planning.search import Sweep
from llamajax.step.resolve import ResolvedRun, attention_kernel, float8_matmuls, resolve_planned

SCHEMA_VERSION = 2
_PEAK_TENSORS = 20
_PROFILE_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
_OF_REMAT = ("peak_bytes", "host_bytes", "fits", "step_time_s", "mfu", "elementwise_bytes", "num_kernels")
_ALTERNATIVE = ("peak_bytes", "fits", "step_time_s", "exposed_comm_s", "exposed_fraction", "sync_collectives_in_loops")


def analytic_figures(config: Config) -> dict[str, Any]:
    """Returns the figures of `config` that formulas compute; needs no compiler."""
    hardware, model = config.hardware, config.model
    tokens = config.train.global_batch_size * config.data.seq_len
    return {
        "schema_version": SCHEMA_VERSION,
        "llamajax": llamajax.__version__,
        "jax_version": jax.__version__,
        "run": Path(config.run_dir).name,
        "gpu": hardware.gpu,
        "nodes": hardware.nodes,
        "gpus_per_node": hardware.gpus_per_node,
        "num_devices": hardware.num_devices,
        "mesh": mesh_sizes(config),
        "num_params": num_params(model),
        "num_active_params": num_active_params(model),
        "tokens_per_step": tokens,
        "model_flops": training_flops_per_token(config, config.data.seq_len, keys=_keys(config)) * tokens,
        "experts": expert_figures(config),
        "remarks": remarks(config),
        "capacity_bytes": planned_gpu(hardware).memory_bytes,
        "zero_minimum_bytes": minimum_state_bytes(config),
        "least_wire_bytes": least_wire_bytes(config, mesh_sizes(config)),
        "checkpoint_bytes": state_bytes(config),
    }


def estimated_figures(config: Config, missing: str) -> dict[str, Any]:
    """Returns `analytic_figures` with an estimate of the memory, for a machine without XLA's compiler for GPUs."""
    run = resolve_planned(config)
    kernels, warning = _kernels(run)
    memory = estimate(run)
    expected = {
        "by_kind": memory.by_kind,
        "peak_bytes": memory.peak_bytes,
        "allowance_bytes": memory.allowance.total_bytes,
        "fits": memory.fits,
        "host": {
            "bytes": memory.host_bytes,
            "host_room_bytes": None if math.isinf(memory.host_room_bytes) else int(memory.host_room_bytes),
        },
    }
    return analytic_figures(run.config) | {
        "compiled": False,
        "forms": {**run.reasons, **kernels},
        "warning": warning,
        "missing": missing,
        "memory_estimate": expected,
    }


def _kernels(run: ResolvedRun) -> tuple[dict[str, str], str | None]:
    """Returns the `forms` that are not settings of `parallel`, and `warning`."""
    capability = run.gpu and run.gpu.compute_capability
    kernel, warning = attention_kernel(run, capability)
    return {"attention": kernel} | float8_matmuls(run.config.model, capability), warning


def figures(plan: Plan, sweep: Sweep | None = None, plans: Sequence[Plan] = ()) -> dict[str, Any]:
    """Returns all figures of a plan, and of the `plans` of a sweep; see this module's docstring."""
    chosen, run = plan.chosen, resolve_planned(plan.config)
    (kernels, warning), config, forms = _kernels(run), run.config, dict(run.reasons)
    if plan.by_remat:
        forms["remat"] = f"{config.model.remat}: {FASTEST}"
    own = schedule_figures(config, chosen)
    others = [alternative.schedule for alternative in plan.alternatives]
    unlike = [schedule for schedule in plan.by_remat.values() if schedule is not plan.guessed]
    unlike += plan.by_remat_on_card.values()
    tries = [schedule for schedule in (plan.guessed, plan.informed, *others, *unlike) if schedule is not None]
    own_s = own["step_time_s"]
    devices = config.hardware.num_devices
    compilations = [step for schedule in tries for step in (schedule.step, schedule.untimed) if step is not None]
    offers = sorted(plan.suggestions, key=lambda offer: offer.step_time_s * offer.candidate.config.hardware.num_devices)
    suggested = [
        {
            "changes": offer.candidate.changes,
            "peak_bytes": offer.memory.peak_bytes,
            "fits": offer.memory.fits,
            "step_time_s": offer.step_time_s,
            "step_time_ratio": offer.step_time_s / own_s,
            "gpu_time_ratio": offer.step_time_s / own_s * (offer.candidate.config.hardware.num_devices / devices),
            "flops_ratio": offer.candidate.flops_ratio,
        }
        for offer in offers
    ]
    return (
        analytic_figures(config)
        | {
            "compiled": True,
            "forms": forms | kernels,
            "warning": warning,
            "calibration": calibration_figures(config),
            "accuracy": accuracy_figures(config.hardware),
            "jax_version": chosen.step.jax_version,
            "options": {key: value for key, value in chosen.step.options.items() if key != _PROFILE_OPTION},
            "latency_profile": config.xla.latency_profile if chosen is plan.informed else None,
            "num_compilations": len(compilations),
            "compile_s": sum(step.compile_s for step in compilations),
        }
        | own
        | {
            "without_profile": schedule_figures(config, plan.guessed),
            "with_profile": plan.informed and schedule_figures(config, plan.informed),
            "alternatives": [_alternative(config, alternative) for alternative in plan.alternatives],
            "best_changes": plan.best_changes,
            "by_remat": {remat: _of_remat(plan.config, remat, schedule) for remat, schedule in plan.by_remat.items()},
            "by_remat_on_card": {
                remat: _of_remat(plan.config, remat, schedule) for remat, schedule in plan.by_remat_on_card.items()
            },
            "suggestions": suggested,
            "host": host_figures(plan.config, chosen),
        }
        | money(config, own["tokens_per_sec_per_device"])
        | domain_figures(config, chosen)
        | {"sweep": sweep and {"key": sweep.key, "rows": sweep_rows(sweep, plans)}}
    )


def domain_figures(config: Config, schedule: Schedule) -> dict[str, Any]:
    """Returns the speed that every domain's network sustains; empty where `hardware.domains` is."""
    speeds = [dataclasses.asdict(speed) for speed in speeds_of_domains(config, schedule)]
    return {"domains": [speed | {"layers": list(speed["layers"])} for speed in speeds]} if speeds else {}


def _of_remat(config: Config, remat: Remat, schedule: Schedule) -> dict[str, Any]:
    own, flops = schedule_figures(config.changed({"model.remat": remat}), schedule), planned_flops(schedule.step.run)
    again = flops.total - planned_flops(resolve_planned(config.changed({"model.remat": "none"}))).total
    return {"recomputed": again / flops.total} | {key: own[key] for key in _OF_REMAT}


def calibration_figures(config: Config) -> dict[str, Any] | None:
    """Returns the measured constants that the cost model uses; None: all are built-in."""
    measurement, machine = read_measurement(config.hardware), planned_machine(config)
    if measurement is None:
        return None
    built_in, measured = vars(machine.built_in), vars(machine.calibration)
    return {
        "file": config.hardware.calibration,
        **_named(measurement, "device", "date", "commit"),
        "jax": measurement.versions.jax,
        "constants": {
            name: {"built_in": built_in[name], "measured": value}
            for name, value in measured.items()
            if value != built_in[name]
        },
    }


def accuracy_figures(hardware: HardwareConfig) -> dict[str, Any] | None:
    """Returns the known error of plans for such GPUs; None: unknown."""
    known = accuracy(hardware)
    return known and dataclasses.asdict(known)


def schedule_figures(config: Config, schedule: Schedule) -> dict[str, Any]:
    """Returns memory and time of one schedule of `config`."""
    memory, timeline, gpu = schedule.memory, schedule.timeline, planned_gpu(config.hardware)
    num_devices, seq_len = config.hardware.num_devices, config.data.seq_len
    tokens_per_sec = config.train.global_batch_size * seq_len / num_devices / timeline.step_time_s
    least, sent = least_wire_bytes(config, mesh_sizes(config)), sum(timeline.wire_bytes.values())
    counted = planned_flops(resolve_planned(config))
    flops = timeline.flops - counted.idle / num_devices
    return {
        **_named(memory, "capacity_bytes", "fits", "argument_bytes", "temp_bytes", "peak_bytes", "host_bytes"),
        "allowance_bytes": memory.allowance.total_bytes,
        "num_communicators": num_communicators(schedule.module),
        "memory": memory.by_kind,
        "memory_fraction": memory.memory_fraction,
        "training_memory_fraction": memory.training_fraction,
        "peak_tensors": [
            {
                "name": t.name,
                "kind": t.kind,
                "dtype": t.buffer.dtype,
                "shape": list(t.buffer.shape),
                "bytes": t.buffer.size,
                "count": count,
            }
            for t, count in memory.largest(_PEAK_TENSORS)
        ],
        **_named(timeline, "step_time_s", "compute_s", "compute_by_kind", "elementwise_bytes", "num_kernels"),
        **_named(timeline, "slowdown_s", "comm_s"),
        **_named(timeline, "exposed_comm_s", "exposed_copy_s", "exposed_fraction"),
        "wire_bytes": sent,
        "wire_bytes_by_link": timeline.wire_bytes,
        "wire_bytes_factor": sent / least if least else None,
        "tokens_per_sec_per_device": tokens_per_sec,
        "mfu": training_flops_per_token(config, seq_len, keys=_keys(config)) * tokens_per_sec / gpu.peak_flops,
        "mfu_full_attention": training_flops_per_token(config, seq_len, full_attention=True)
        * tokens_per_sec
        / gpu.peak_flops,
        "hfu": flops / timeline.step_time_s / gpu.peak_flops,
        "flops": flops,
        "idle_flops": counted.idle / num_devices,
        "flops_factor": (flops - timeline.rematerialized_flops) * num_devices / counted.total,
        "rematerialized_flops": timeline.rematerialized_flops,
        "pipeline": _pipeline(schedule),
        "attention_kernel": compiled_attention(schedule.module),
        "sync_collectives_in_loops": timeline.sync_collectives_in_loops,
        "not_understood": timeline.not_understood,
        "collectives": [_collective(use) for use in timeline.collectives],
    }


def _pipeline(schedule: Schedule) -> dict[str, Any] | None:
    run = schedule.step.run
    work = StageWork.of(run.config, run.mesh)
    if work.stages == 1:
        return None
    ticks = {"fill": work.fill, "both": work.both, "drain": work.drain}
    loops = tick_loops(schedule.timeline, **ticks)
    permutes = pipeline_bytes(run.config, run.mesh)["permutes"]
    return {
        **_named(work, "layers", "slots", "bubble"),
        "ticks": ticks,
        "tick_s": loops and {name: loop.seconds / loop.num_iterations for name, loop in zip(ticks, loops, strict=True)},
        "bytes_per_tick": permutes / (work.forward_passes + work.backward_passes),
    }


def _keys(config: Config) -> float:
    return mean_keys(config.model, config.data.seq_len, config.data.mean_document_length)


def _alternative(config: Config, alternative: Alternative) -> dict[str, Any]:
    own = schedule_figures(config, alternative.schedule)
    return {"changes": alternative.changes} | {key: own[key] for key in _ALTERNATIVE}


def _collective(use: CollectiveUse) -> dict[str, Any]:
    return {
        **_named(use.collective, "name", "kind", "axis", "group_size", "num_nodes", "link"),
        "bytes": use.collective.num_bytes,
        **_named(use, "count", "seconds"),
        "hidden_s": use.hidden_s if use.hidden_s > 1e-9 * use.seconds else 0.0,  # without the sums' rounding
        **_named(use, "exposed_s", "is_sync", "in_loop"),
    }


def _named(of: Any, *names: str) -> dict[str, Any]:
    """Returns figures under the names that they have here."""
    return {name: getattr(of, name) for name in names}


def money(config: Config, tokens_per_sec_per_device: float) -> dict[str, float | None]:
    """Returns days and price of the token budget, and the price of a billion tokens; prices are None unless one is set."""
    hardware = config.hardware
    budget = config.planned_tokens
    gpu_hours_per_token = 1 / tokens_per_sec_per_device / 3600
    price = hardware.price_per_gpu_hour and hardware.price_per_gpu_hour * gpu_hours_per_token
    return {
        "token_budget": budget,
        "days": budget * gpu_hours_per_token / hardware.num_devices / 24,
        "price_per_billion_tokens": price and price * 1e9,
        "price": price and price * budget,
    }


def ramp(config: Config, run: ResolvedRun, told: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the figures of the ramp of `config`, from the resolved run of its full batch and the figures `told` of that
    batch; None: it has no ramp."""
    phases = config.train.batch_phases
    if len(phases) == 1:
        return None
    stages, chunks = run.mesh["pipeline"], run.config.parallel.pipeline_chunks or 1

    def time_per_token(batch_size: int) -> float:
        """Returns the time of a token in such a batch, relative to stages that never wait for each other."""
        micro_batches = batch_size // config.train.micro_batch_size
        return 1 + (stages - 1) / (chunks if micro_batches % stages == 0 else 1) / micro_batches

    tokens = [config.tokens_after(phase.from_step) for phase in phases]
    days_of_full = told["days"] / told["token_budget"] / time_per_token(phases[-1].batch_size)
    days = sum(
        (end - begin) * time_per_token(phase.batch_size) * days_of_full
        for phase, (begin, end) in zip(phases, itertools.pairwise(tokens), strict=False)
    )
    rest = told["days"] * (1 - tokens[-1] / told["token_budget"])
    return {
        "phases": len(phases),
        "steps": phases[-1].from_step,
        "tokens": tokens[-1],
        "days": days,
        "budget_days": days + rest,
    }


def sweep_rows(sweep: Sweep, plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Returns one row of figures for each value of a sweep."""
    rows, first = [], math.nan
    for value, plan in zip(sweep.values, plans, strict=True):
        own = schedule_figures(plan.config, plan.chosen)
        speed = own["tokens_per_sec_per_device"]
        first = speed if not rows else first
        scalars = {key: number for key, number in own.items() if not isinstance(number, dict | list)}
        row = {"value": value, "num_devices": plan.config.hardware.num_devices, "efficiency": speed / first}
        rows.append(row | scalars | money(plan.config, speed))
    return rows
