"""Processes that use a hub, each with its own cache, forked from a server that has loaded torch."""

import contextlib
import io
import os
import sys
import time
from multiprocessing import forkserver, get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

SERVER, FORKS = forkserver.ForkServer(), get_context("forkserver")
LOADED = ["torch._dynamo", "torch.distributed.tensor", "pandas", "scipy.stats", "sklearn.metrics"]


def serve(environment, folder, log, pipe):
    """Answer what a test asks, in an environment and folder of this process."""
    assert "huggingface_hub" not in sys.modules
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with log.open("w") as errors:
        os.dup2(errors.fileno(), 2)
    import huggingface_hub.file_download

    from featcal.cli import main as cli
    from featcal.data.places import location_of, open_table
    from featcal.errors import FeatCalError
    from reproduction.prepare import hub

    def opened(name, split):
        open_table(location_of("--data", name), split)
        return "opened"

    def printed(*arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = cli.main(list(arguments))
        return f"{code} {out.getvalue()}"

    asked = {"fetch": hub.fetch, "data": lambda name, pins: hub.pinned_data(pins, name)}
    asked |= {"featcal": lambda *arguments: cli.main(list(arguments)), "open": opened}
    asked["printed"] = printed
    asked["token"] = lambda token: os.environ.update(HF_TOKEN=token)
    # as with a large file, what came before a connection broke off is kept; and no seconds of
    # waiting between attempts
    huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 100
    for module in (huggingface_hub.file_download, huggingface_hub.utils._http):
        module.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    while True:
        what, arguments = pipe.recv()
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                answer = asked[what](*arguments)
            except FeatCalError as error:
                answer = f"{type(error).__name__}: {error}"
        pipe.send((answer if isinstance(answer, int) else str(answer), said.getvalue()))


class Client:
    """A process in a folder, asked one thing after another."""

    def __init__(self, environment: dict[str, str], folder: Path):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.log = folder / f"log-{id(self)}"
        self.pipe, theirs = FORKS.Pipe()
        given = kept | environment, folder, self.log, theirs
        self.process = FORKS.Process(target=serve, args=given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            patch.setattr(forkserver, "connect_to_new_process", SERVER.connect_to_new_process)
            SERVER.set_forkserver_preload(LOADED)
            self.process.start()
        theirs.close()

    def ask(self, what: str, *arguments: str):
        self.pipe.send((what, [str(a) for a in arguments]))
        try:
            return self.pipe.recv()
        except EOFError:
            raise AssertionError(self.log.read_text()) from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.join()
