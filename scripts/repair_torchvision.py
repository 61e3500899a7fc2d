"""Make a torchvision importable that does not load next to this torch (`make setup` runs this).

python scripts/repair_torchvision.py

torchvision registers shape rules for operators of its compiled extension. Next to a CPU build of
torch the extension of a CUDA build does not load; the import then fails at the first of these
operators, and every model class of transformers and all of open_clip fail with it. Declaring the
operators is enough: nothing here calls them.

Where torchvision fails this way, the script copies itself into the environment's site-packages,
next to a .pth file that runs `install` at every start of Python. The copy waits for the first import
of torchvision and acts only when that fails. It imports nothing but Python's own modules.
"""

import sys

MODULE = "_torchvision_operators"  # the copy in site-packages
FORMER = "featcal_torchvision_mend.pth"  # of earlier versions
BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATORS = {"nms": "nms" + BOXES, "qnms": "qnms" + BOXES}
DECLARED = []  # torch drops a declaration when its library object is collected


class RepairingLoader:
    """Run torchvision's own loader; when an operator is unknown, declare it and run it again."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def exec_module(self, module):
        for _ in OPERATORS:
            try:
                return self.loader.exec_module(module)
            except RuntimeError as error:
                declare(error)
                for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                    del sys.modules[name]
        return self.loader.exec_module(module)


def declare(error):
    """Declare the operator that the error names. Any other error is raised again."""
    name = str(error).removeprefix("operator torchvision::").removesuffix(" does not exist")
    if name not in OPERATORS:
        raise error
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(OPERATORS[name])
    DECLARED.append(library)


class TorchvisionFinder:
    """Wrap the loader of torchvision and of nothing else."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = RepairingLoader(spec.loader)
        return spec


def install():
    """Put the finder in front of the import system."""
    sys.meta_path.insert(0, TorchvisionFinder())


def main():
    """Install the copy where torchvision does not load without it; remove it elsewhere."""
    import subprocess
    import sysconfig
    from importlib.util import find_spec
    from pathlib import Path

    site = Path(sysconfig.get_path("purelib"))
    copy, line = site / f"{MODULE}.py", site / f"{MODULE}.pth"
    for path in (site / FORMER, line, copy):
        path.unlink(missing_ok=True)
    if find_spec("torchvision") is None:
        return
    done = subprocess.run(
        [sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False
    )
    if done.returncode and "operator torchvision::" in done.stderr:
        copy.write_text(Path(__file__).read_text("utf-8"), encoding="utf-8")
        line.write_text(f"import {MODULE}; {MODULE}.install()\n")
        print(f"torchvision does not load next to this torch: repaired by {line}")


if __name__ == "__main__":
    main()
