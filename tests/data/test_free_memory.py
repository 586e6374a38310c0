"""Memory that a process can still take: the smallest remainder of the machine and the control groups."""

from llamajax.data.free_memory import free_memory


def write(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def test_the_narrowest_limit_counts(tmp_path):
    assert free_memory(tmp_path) is None
    write(tmp_path, {"proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:    7000 kB\n"})
    assert free_memory(tmp_path) == 7000 * 1024
    step = "sys/fs/cgroup/job_7/step_0"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu:/other\n0::/job_7/step_0\n",
            f"{step}/memory.max": "max\n",
            f"{step}/memory.stat": "anon 1000\nfile 9000\n",
            "sys/fs/cgroup/job_7/memory.max": "5000000\n",
            "sys/fs/cgroup/job_7/memory.stat": "anon 2000000\nfile 9000000\n",
        },
    )
    assert free_memory(tmp_path) == 3_000_000  # what is only kept of files can be dropped
    write(tmp_path, {f"{step}/memory.max": "500\n"})
    assert free_memory(tmp_path) == 0


def test_this_machine():
    free = free_memory()
    assert free is None or free > 2**20
