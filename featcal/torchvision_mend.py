"""Makes a CUDA-linked torchvision importable beside a CPU-only torch.

torchvision registers shape rules for operators that its compiled extension defines. Where the
extension cannot be loaded (no CUDA libraries beside a CPU torch) the import dies on the first such
operator, and with it every model class of transformers and all of open_clip. Declaring the
operator's name is enough: nothing here calls it. The hook waits for the first import of
torchvision, so importing featcal loads neither torch nor torchvision; it acts only after a failed
import: a working torchvision is left alone.

`install_for_all` mends it for all programs of an environment, such as mergekit's, that never import
featcal.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HOOK = "import importlib.util as u; u.find_spec('featcal') and __import__('featcal.torchvision_mend').torchvision_mend.install()\n"
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_SCHEMAS = {"nms": _BOXES, "qnms": _BOXES}
_DECLARED: list[Any] = []  # torch forgets a declaration when its library object is collected


class _MendingLoader(importlib.abc.Loader):
    """Runs torchvision's own loader; on an unknown operator declares it and runs the loader
    again.
    """

    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        for _ in range(len(_SCHEMAS)):
            try:
                self._loader.exec_module(module)
                return
            except RuntimeError as error:
                _declare(error)
                for name in [n for n in sys.modules if n.startswith("torchvision.")]:
                    del sys.modules[name]
        self._loader.exec_module(module)


def _declare(error: RuntimeError) -> None:
    """Declare the operator that the error says is missing; any other error goes on."""
    found = re.search(r"operator torchvision::(\w+) does not exist", str(error))
    if not found or found[1] not in _SCHEMAS:
        raise error
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(found[1] + _SCHEMAS[found[1]])
    _DECLARED.append(library)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of torchvision and of nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _MendingLoader(spec.loader)
        return spec


def install() -> None:
    """Put the hook in front of the import system, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def install_for_all() -> bool:
    """Have every Python of this environment put the hook in place, where torchvision does not load
    without; whether that is so.

    Python runs the line of a .pth file in its site-packages at its start.
    """
    import subprocess  # which costs every start of a command too much
    import sysconfig

    line = Path(sysconfig.get_path("purelib")) / "featcal_torchvision_mend.pth"
    line.unlink(missing_ok=True)
    if importlib.util.find_spec("torchvision") is None:
        return False
    loads = "import sys; sys.modules['featcal'] = None; import torchvision"
    broken = (
        subprocess.run([sys.executable, "-c", loads], capture_output=True, check=False).returncode
        != 0
    )
    if broken:
        line.write_text(HOOK)
    return broken
