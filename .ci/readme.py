"""Runs every command of the README in order, as written: each ```sh block by bash, each ```python block by the venv."""

import pathlib
import re
import subprocess
import time

readme = pathlib.Path("README.md").read_text()
blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
assert blocks, "the README has no commands"
for language, text in blocks:
    print(f"--- README: {text.strip()}", flush=True)
    started = time.monotonic()
    command = ["bash", "-euo", "pipefail", "-c", text] if language == "sh" else [".venv/bin/python", "-c", text]
    subprocess.run(command, check=True)
    print(f"--- took {time.monotonic() - started:.0f} s", flush=True)
