"""Processes that use a hub: each with its own cache, its real clients asked one thing at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

CLIENT = """
import contextlib, io, json, os, sys, time, types
import huggingface_hub.file_download
from featcal.cli import main as cli
from featcal.errors import FeatCalError
from featcal.data.places import location_of
from featcal.data.places import open_table
from reproduction.prepare import hub

def opened(name, split):
    open_table(location_of("--data", name), split)
    return "opened"

# as with a large file, what came before a connection broke off is kept; and no seconds of waiting between attempts
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 100
for module in (huggingface_hub.file_download, huggingface_hub.utils._http):
    module.time = types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
for line in sys.stdin:
    what, arguments = json.loads(line)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        if what == "featcal":
            code = cli.main(arguments)
        elif what == "token":
            code = os.environ["HF_TOKEN"] = arguments[0]
        else:
            try:
                asked = {"fetch": hub.fetch, "data": lambda name, pins: hub.pinned_data(pins, name)}
                code = str(asked.get(what, opened)(*arguments))
            except FeatCalError as error:
                code = f"{type(error).__name__}: {error}"
    print(json.dumps([code, said.getvalue()]), flush=True)
"""


class Client:
    """A process in a folder, asked one thing after another."""

    def __init__(self, environment: dict[str, str], folder: Path):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.log = folder / f"log-{id(self)}"
        with self.log.open("w") as errors:
            how = {"env": {**kept, **environment}, "cwd": folder, "stdin": -1, "stdout": -1}
            command = [sys.executable, "-c", CLIENT]
            self.process = subprocess.Popen(command, text=True, stderr=errors, **how)

    def ask(self, what: str, *arguments: str):
        self.process.stdin.write(json.dumps([what, [str(a) for a in arguments]]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()
        return json.loads(answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate(timeout=30)
