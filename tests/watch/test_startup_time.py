"""When a process began, and what came before its first step."""

import json
import subprocess
import sys
import time

PROGRAM = """
import json, time, llamajax
time.sleep(0.3)
from llamajax.watch import startup_time
told = [startup_time.first_step()]
startup_time.begin("start"); time.sleep(0.1); startup_time.begin("compile"); time.sleep(0.2)
startup_time.begin("load"); time.sleep(0.1)
told += [startup_time.first_step(), startup_time.first_step()]
startup_time.begin("start"); time.sleep(0.1)
told += [startup_time.first_step()]
print(json.dumps(told))
"""


def test_a_process_knows_when_it_began_and_where_its_time_went():
    before = time.time()
    process = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    ended = time.time()
    nothing, first, again, second = json.loads(process.stdout)
    assert nothing == again == {}, "told once"
    assert before - 0.1 <= first["began"] <= before + 1, "the process's beginning, not that of its run"
    assert first["start_s"] >= 0.4
    assert first["compile_s"] >= 0.2
    assert first["load_s"] >= 0.1
    assert before + 0.7 <= second["began"] <= ended, "that of its second run"
    assert second["start_s"] >= 0.1
    assert set(second) == {"began", "start_s"}
    assert sum(first[part] for part in ("start_s", "compile_s", "load_s")) <= ended - before
