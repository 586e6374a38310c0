"""Imports, trains, evaluates, exports and generates with directories made to do harm, and prints as JSON what Python was
asked to do meanwhile that it should not: `python -m tests.faults.audited DIRECTORY`."""

import dataclasses
import ipaddress
import json
import os
import sys
from pathlib import Path
from typing import Any

from converters import convert
from converters.arguments import hf_arguments
from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import TrainConfig
from llamajax.data.chat import chat_template
from llamajax.parallel import startup
from llamajax.training.run import run
from llamajax.weights.open_model import open_pretrained
from tests import runs
from tests.converters.mutate import write_whole
from tests.tiny import tiny_config

CANARY = "print(open('{canary}', 'w').write('ran'))"
TEMPLATE = (
    "{{ messages | attr('__class__') }}{{ raise_exception.__globals__ }}{{ messages | map(attribute='content') | join }}"
)
"""Asks for what the sandbox hides, and goes on to what is said; those that are refused are in `bad_templates`."""
OUTSIDE = "outside.json"
"""A file beside the model, which it names as its own."""
_PROCESS = [sys.executable, "-P", str(chat_template._PROCESS)]


def write_hostile(directory: Path, canary: Path) -> None:
    """A whole model with everything beside it that other programs have been made to run."""
    write_whole(directory, "llama3.2")
    code = CANARY.format(canary=canary)
    for name in ("modeling_evil.py", "tokenization_evil.py", "conftest.py", "sitecustomize.py", "jinja2.py", "setup.py"):
        (directory / name).write_text(code)
    pickled = f'cbuiltins\nexec\n(S"{code}"\ntR.'.encode()
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pkl", "rng.npy"):
        (directory / name).write_bytes(pickled)
    auto = {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    outside = dict.fromkeys(
        ("tokenizer_file", "vocab_file", "merges_file", "chat_template_file"), str(directory.parent / OUTSIDE)
    )
    for name, extra in (("config.json", auto), ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_evil.T", None]})):
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": extra} | outside))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "adapter_config.yaml").write_text(f'!!python/object/apply:builtins.exec ["{code}"]')


def watch(hostile: Path) -> list[str]:
    """From here on notes what is asked of Python, in the list that it returns; code of the libraries is not meant."""
    noted: list[str] = []

    def is_far(address: Any) -> bool:
        if not isinstance(address, tuple):
            return False  # of a file
        try:
            return not ipaddress.ip_address(address[0]).is_loopback
        except ValueError:
            return address[0] not in ("", "localhost")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        match event, arguments:
            case "exec", (code, *_) if code.co_filename.startswith(str(hostile)):
                noted.append(f"exec {code.co_filename}")
            case "compile", (source, filename) if str(hostile) in f"{source!r} {filename!r}":
                noted.append(f"compile {filename}")
            case "import", (module, filename, *_) if str(filename).startswith(str(hostile)):
                noted.append(f"import {module}")
            case "open", (str() | os.PathLike() as path, *_) if os.path.basename(path) == OUTSIDE:
                noted.append(f"open {path}")
            case "pickle.find_class", (module, name):
                noted.append(f"pickle {module}.{name}")
            case "subprocess.Popen", (_, command, *_) if list(command) != _PROCESS:
                noted.append(f"subprocess {command}")
            case (("os.system" | "os.exec" | "os.posix_spawn"), _) if arguments[1:2] != (_PROCESS,):
                noted.append(f"{event} {arguments}")
            case (("socket.connect" | "socket.bind" | "socket.sendto"), (_, address)) if is_far(address):
                noted.append(f"{event} {address}")
            case "socket.getaddrinfo", (host, *_) if host not in (None, "", "localhost", "127.0.0.1"):
                noted.append(f"{event} {host}")

    sys.addaudithook(hook)
    return noted


def main(directory: Path) -> None:
    """Does it all."""
    hostile = directory / "hostile"
    write_hostile(hostile, directory / "canary")
    (directory / OUTSIDE).write_text("{}")
    text = json.dumps({"text": "{{ ''.__class__ }} !!python/object/apply:os.system [id] " * 20})
    (directory / "text.jsonl").write_text(f"{text}\n" * 50)
    mesh = MeshConfig(num_cpu_devices=1)
    startup.select_platform(mesh)
    noted = watch(hostile)
    os.chdir(hostile)  # as who looks at a download before using it
    imported = convert.main(hf_arguments([str(hostile), str(directory / "imported")]))
    config = tiny_config(
        str(directory / "run"),
        model=dataclasses.replace(open_pretrained(hostile).config, attention_kernel="plain"),
        data=DataConfig(
            sources=(SourceConfig(kind="jsonl", paths=(str(directory / "text.jsonl"),)),), seq_len=16,
            cache_dir=str(directory / "cache"), held_out_fraction=0.0,
        ),
        train=TrainConfig(num_steps=2, global_batch_size=2, eval_batches=0),
        mesh=mesh,
        init_from=str(hostile),
    )  # fmt: skip
    run(config)
    listening = runs.listening(os.getpid())
    exported = convert.main(hf_arguments(["export", str(directory / "run"), str(directory / "exported")]))
    from llamajax.config.evaluate import EvaluateConfig
    from llamajax.config.generate import GenerateConfig
    from llamajax.evaluation.run import run as evaluate
    from llamajax.generation.run import run as generate

    own = str(directory / "run" / "config.yaml")
    evaluate(EvaluateConfig(model=str(hostile), data=own, split="train", num_batches=1, mesh=mesh))
    generate(GenerateConfig(model=str(directory / "exported"), prompt=("a b",), max_tokens=2, mesh=mesh))
    generate(GenerateConfig(model=str(directory / "exported"), prompt=("a b",), chat=True, max_tokens=2, mesh=mesh))
    found = {"noted": [*noted], "codes": [imported, exported], "listening": sorted(listening)}
    found["canary"] = (directory / "canary").exists()
    seen = len(noted)
    exec(compile("1", str(hostile / "x.py"), "exec"))  # what is looked for would be found
    (directory / OUTSIDE).read_text()
    found["control"] = noted[seen:]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
