"""Runs every command of the README in order, as written: each ```sh block by bash, each ```python block by the venv.

`python .ci/readme.py [WORD]` runs the blocks that contain WORD only.
"""

import pathlib
import re
import subprocess
import sys
import time

blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", pathlib.Path("README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
word = sys.argv[1] if len(sys.argv) > 1 else ""
chosen = [(language, text) for language, text in blocks if word in text]
assert chosen, f"the README has no block with {word!r}"
for language, text in chosen:
    print(f"--- README: {text.strip()}", flush=True)
    started = time.monotonic()
    command = ["bash", "-euo", "pipefail", "-c", text] if language == "sh" else [".venv/bin/python", "-c", text]
    subprocess.run(command, check=True)
    print(f"--- took {time.monotonic() - started:.0f} s", flush=True)
