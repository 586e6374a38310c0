#!/usr/bin/env bash
# Checks that an exported model is the same in llama.cpp: ids of 471 texts, greedy texts and logits, for the quickstart's run
# and an imported model of every kind. Also checks the ids in transformers 4.57.
#
#   scripts/check_llama_cpp.sh [DIRECTORY]
#
# Builds llama.cpp (five minutes on two cores) and trains the quickstart (three minutes) in DIRECTORY (10 GB), or in a
# temporary directory that is removed at the end. Existing contents of DIRECTORY are reused, so a second call is quick.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
version=0.3.36 # of llama-cpp-python; its source distribution contains llama.cpp and its converter
if [ $# -gt 0 ]; then
  mkdir -p "$1" && work=$(cd "$1" && pwd)
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
cd "$work"

if [ ! -e venv/complete ]; then
  python3 -m venv venv
  venv/bin/pip install --quiet -c "$repository/requirements.lock" -e "$repository[test]"
  venv/bin/pip download --quiet --no-deps --no-binary :all: "llama-cpp-python==$version"
  tar xzf "llama_cpp_python-$version.tar.gz"
  # Builds without image support and without the library that only llama.cpp's own programs share.
  sed -i 's/LLAMA_BUILD_COMMON ON CACHE/LLAMA_BUILD_COMMON OFF CACHE/' "llama_cpp_python-$version/CMakeLists.txt"
  CMAKE_ARGS=-DLLAVA_BUILD=OFF CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
    venv/bin/pip install --quiet "./llama_cpp_python-$version" "./llama_cpp_python-$version/vendor/llama.cpp/gguf-py"
  touch venv/complete
fi
if [ ! -e venv4/complete ]; then
  python3 -m venv venv4
  venv4/bin/pip install --quiet 'transformers==4.57.*' # no torch: only its tokenizers
  touch venv4/complete
fi
export JAX_PLATFORMS=cpu PYTHONPATH=$repository
if [ ! -d quickstart ]; then
  venv/bin/python -m llamajax.train --config "$repository/configs/quickstart.yaml" --run_dir quickstart --data.cache_dir cache
fi
venv/bin/python "$repository/scripts/check_llama_cpp.py" \
  "llama_cpp_python-$version/vendor/llama.cpp/convert_hf_to_gguf.py" venv4/bin/python
