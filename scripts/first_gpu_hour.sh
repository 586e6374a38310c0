#!/usr/bin/env bash
# The first hour on a GPU: measures within 45 minutes what a CPU cannot show, and writes one dated report.
#
#   scripts/first_gpu_hour.sh [--toy] [DIRECTORY]
#
# Parts: attention's kernels, right and fast, with many rows and with one; those of experts; the constants that plans go by;
# the training step beside torch's, with whole rows and with packed ones; 50 steps trained twice, once killed at step 25, whose losses should
# agree to the last bit. A part that fails or runs out of its time does not stop the others. All output is in DIRECTORY
# (default runs/first_gpu_hour): report.md, and each part's own output. --toy does the same on a CPU and reports no times.
# PARTS="kernels determinism" runs these alone; PYTHON names the interpreter.
#
# Exit code 1: a part failed; the report says which.
set -uo pipefail
cd "$(dirname "$0")/.."

toy=()
on_cpu=()
if [ "${1:-}" = --toy ]; then
  toy=(--toy)
  on_cpu=(--device cpu)
  shift
fi
out=${1:-runs/first_gpu_hour}
python=${PYTHON:-.venv/bin/python}
parts=${PARTS:-kernels experts calibration step packed determinism}
gpus=${CUDA_VISIBLE_DEVICES-0}
export CUDA_VISIBLE_DEVICES=${gpus%%,*} # the first of several, as in scripts/bench/card.py
mkdir -p "$out"
report=$out/report.md
failed=()

part() { # name, title, seconds, command ...
  local name=$1 title=$2 limit=$3 began=$SECONDS code=0
  shift 3
  case " $parts " in *" $name "*) ;; *) return ;; esac
  echo "$title: at most $((limit / 60)) minutes; output in $out/$name.log"
  timeout --kill-after=20 "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
  [ "$code" = 0 ] || failed+=("$name")
  {
    printf '\n## %s\n\n`%s`\n\nExit code %s after %s s%s.\n\n```text\n' \
      "$title" "$*" "$code" "$((SECONDS - began))" "$([ "$code" = 124 ] && echo ', its limit')"
    tail -n 80 "$out/$name.log"
    printf '```\n'
  } >>"$report"
}

determinism() { # trains 50 steps twice, the second time with a kill -9 at step 25, and compares every loss
  local settings=(--config configs/quickstart.yaml --train.num_steps 50 --optimizer.warmup_steps 10
    --optimizer.decay_steps 20 --checkpoint.save_every 10 --checkpoint.keep_last 10 --metrics.log_every 1
    --train.eval_every 50 --data.cache_dir "$out/cache")
  if [ ${#toy[@]} = 0 ]; then
    settings+=(--mesh.num_cpu_devices null --mesh.fsdp 1 --mesh.sequence 1 --mesh.tensor 1 --model.compute_dtype bfloat16
      --model.attend_across_documents true --xla.deterministic true --xla.compilation_cache "$out/programs")
  fi
  rm -rf "$out/whole" "$out/killed"
  "$python" -m llamajax.train "${settings[@]}" --run_dir "$out/whole" || return
  "$python" -m llamajax.train "${settings[@]}" --run_dir "$out/killed" &
  local run=$!
  while kill -0 "$run" 2>/dev/null && ! grep -q '"step": 25,' "$out/killed/metrics.jsonl" 2>/dev/null; do sleep 0.02; done
  kill -9 "$run" && echo "killed at step 25"
  wait "$run" 2>/dev/null
  "$python" -m llamajax.train "${settings[@]}" --run_dir "$out/killed" || return
  "$python" - "$out/whole/metrics.jsonl" "$out/killed/metrics.jsonl" <<'PYTHON'
import json
import pathlib
import sys


def losses(path):
    records = map(json.loads, pathlib.Path(path).read_text().splitlines())
    return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}


whole, killed = map(losses, sys.argv[1:])
differ = [step for step in whole if whole[step] != killed.get(step)]
print(f"{len(whole)} losses, of which {len(differ)} differ" + (f", first at step {differ[0]}" if differ else ""))
sys.exit(bool(differ) or len(whole) != 50)
PYTHON
}

{
  printf '# First hour on a GPU, %s\n\n' "$(date -u +%Y-%m-%dT%H:%MZ)"
  printf 'Commit %s. ' "$("$python" -c 'from scripts.checkout import commit; print(commit())')"
  printf '%s.\n' "$("$python" -c 'import platform, jax, jaxlib
print(f"Python {platform.python_version()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")')"
  if [ ${#toy[@]} != 0 ]; then
    printf 'A trial on a CPU: no figure below is a measurement.\n'
  else
    printf '\n```text\n'
    nvidia-smi --query-gpu=name,memory.total,driver_version,power.limit,clocks.max.sm --format=csv
    printf '```\n'
  fi
} >"$report"

part kernels "Attention's kernels" 480 "$python" scripts/bench_attention.py "${toy[@]}" --json "$out/attention.json"
of_experts=("${toy[@]}")
[ ${#toy[@]} != 0 ] || of_experts=(--rows 512,8192)
part experts "Experts' kernels" 240 "$python" scripts/bench_grouped.py "${of_experts[@]}" --json "$out/experts.json"
part calibration "Constants of plans" 540 "$python" scripts/calibrate_gpu.py "${on_cpu[@]}" --output "$out/calibration.yaml"
part step "The training step beside torch" 580 "$python" scripts/bench_gpu.py "${toy[@]}" --json "$out/step.json"
if [ ${#toy[@]} = 0 ]; then # the toy's rows are already packed
  part packed "Packed rows" 500 "$python" scripts/bench_gpu.py --packed yes --json "$out/packed.json"
fi
export -f determinism
export python out
part determinism "50 steps twice, once killed" 360 bash -c "toy=(${toy[*]}); determinism"

echo "report: $report"
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2 && exit 1; }
