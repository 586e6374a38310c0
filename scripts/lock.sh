#!/usr/bin/env bash
# Writes requirements.lock: one set of versions for each supported Python, used as `pip install -c requirements.lock`; and
# requirements.cuda13.lock: the versions that a run on GPUs needs, with hashes, which pip rejects together with `-e .`.
set -euo pipefail
cd "$(dirname "$0")/.."
lock_env=$(mktemp -d)
trap 'rm -rf "$lock_env"' EXIT
python3 -m venv "$lock_env"
"$lock_env/bin/pip" install --quiet uv
"$lock_env/bin/uv" pip compile --quiet --universal --upgrade --python-version 3.11 --extra dev --no-annotate \
  --custom-compile-command scripts/lock.sh pyproject.toml --output-file requirements.lock
"$lock_env/bin/uv" pip compile --quiet --universal --python-version 3.11 --extra cuda13 --no-annotate --generate-hashes \
  --constraint requirements.lock --custom-compile-command scripts/lock.sh pyproject.toml \
  --output-file requirements.cuda13.lock
