"""Not a test: estimate and measure memory and disk of one calibration of random models in folders.

python tests/memory_of_a_run.py --root FOLDER [--width 512 --layers 2 --tasks 2 --samples 24 --batch 6
--host-memory BYTES] prints one JSON object. The peak of a process means something only in a process
that does nothing else.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.growth import BASE, planned, taken, write_models
from benchmarks.measure import arguments
from featcal.cli.calibrate import return_large_blocks


class Files:
    """The most bytes below a folder while the `with` ran, looked at before a file is removed."""

    def __init__(self, folder: Path):
        self.folder, self.peak, self.watching = folder, 0, False
        sys.addaudithook(self.before)

    def before(self, event: str, _: tuple[object, ...]) -> None:
        if self.watching and event in {"os.remove", "os.rename", "os.truncate", "os.rmdir"}:
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        sizes = {}  # by inode: a file may have two names
        for place, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):  # a thread may remove one meanwhile
                    about = os.stat(os.path.join(place, name))
                    sizes[about.st_ino] = about.st_size
        return sum(sizes.values())

    def __enter__(self) -> "Files":
        self.watching = True
        return self

    def __exit__(self, *_: object) -> None:
        self.peak, self.watching = max(self.peak, self.now()), False


def main() -> None:
    args = arguments(__doc__, **BASE, root="", host_memory=-1, clock=0).parse_args()
    torch.set_num_threads(args.threads)
    root, host_memory = Path(args.root), None if args.host_memory < 0 else args.host_memory
    return_large_blocks()  # models that are written here must not count as memory in use
    write_models(args, root)
    estimated, files = planned(args, root, host_memory), Files(root)
    stored = files.now()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    with files:
        host = taken(args, root, host_memory)["host_bytes"]
    took = {"host": host, "disk": files.peak - stored}
    print(json.dumps({"estimated": estimated, "took": took}))


if __name__ == "__main__":
    main()
