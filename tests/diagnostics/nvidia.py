"""What `nvidia-smi` prints, in the form of reports that people have published, and a program that prints it."""

import sys
from pathlib import Path

from llamajax.diagnostics import nvidia_smi

HGX = "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n" + "".join(
    f"GPU{own}\t"
    + "\t".join(" X " if own == other else "NV18" for other in range(4))
    + f"\tPXB\tNODE\t0-55,112-167\t{own // 2}\t\tN/A\n"
    for own in range(4)
)
HGX += "NIC0\tPXB\tNODE\tNODE\tSYS\t X \tNODE\t\t\t\t\nNIC1\tNODE\tPXB\tSYS\tSYS\tNODE\t X \t\t\t\t\n"
HGX += "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n\n"
HGX += "NIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
"""Four cards with NVLink to a switch, as terminals get it: the header is underlined."""
DEGRADED = HGX.replace("GPU2\tNV18\tNV18\t X \tNV18", "GPU2\tNV16\tNV16\t X \tNV16").replace(
    "GPU0\t X \tNV18\tNV18", "GPU0\t X \tNV18\tNV16"
)
DEGRADED = DEGRADED.replace("GPU1\tNV18\t X \tNV18", "GPU1\tNV18\t X \tNV16")
BRIDGED = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV4     SYS     SYS     0-23            0
GPU1    NV4      X      SYS     SYS     0-23            0
GPU2    SYS     SYS      X      NV4     24-47           1
GPU3    SYS     SYS     NV4      X      24-47           1
"""
"""Pairs of cards with bridges, in the columns of older drivers."""
CARDS = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
CARDS += "GPU0\t X \tPHB\t0-63\t0\t\tN/A\nGPU1\tPHB\t X \t0-63\t0\t\tN/A\n"

FIELDS = tuple(field for field in nvidia_smi.FIELDS if field != "fabric.state")
"""Fields of the rows below: drivers before 550 have no `fabric.state`."""
H100 = "".join(
    f"{own}, NVIDIA H100 80GB HBM3, GPU-{own}, 580.95.05, 81559, 0, Enabled, Default, Disabled, Enabled, 0, 16, 16, 700.00,"
    " 700.00, Not Active\n"
    for own in range(4)
)
GEFORCE = """\
WARNING: infoROM is corrupted at gpu 0000:01:00.0
0, NVIDIA GeForce RTX 4090, GPU-a, 570.124.06, 24564, 18011, Disabled, Default, [N/A], [N/A], [N/A], 4, 16, 300.00, 450.00, \
Active
1, NVIDIA GeForce RTX 3090, GPU-b, 570.124.06, 24576, 312, Disabled, Default, [N/A], [N/A], [N/A], 16, 16, [N/A], [N/A], \
Not Active
"""
APPS = "GPU-a, 72210, /opt/env/bin/python, 17600\nGPU-a, 5930,  [Not Found], 400\n"
REMAPPED = "GPU-0, No, No\nGPU-1, Yes, No\nGPU-2, No, Yes\n"


def install(folder: Path, *, gpu: str, topology: str, apps: str = "", remapped: str = "", code: int = 0) -> None:
    """Puts a `nvidia-smi` into a folder that answers with these texts, and refuses the field `fabric.state` as drivers
    before 550 do."""
    program = folder / "nvidia-smi"
    answers = {"--query-gpu": gpu, "--query-compute-apps": apps, "--query-remapped-rows": remapped, "topo": topology}
    program.write_text(
        f"#!{sys.executable} -S\nimport sys\nasked = sys.argv[1]\nif 'fabric.state' in asked:\n"
        "    print('Field \"fabric.state\" is not a valid field to query.\\n')\n    sys.exit(2)\n"
        f"print({answers!r}[asked.partition('=')[0]], end='')\nsys.exit({code} if '--query-gpu' in asked else 0)\n"
    )
    program.chmod(0o755)
