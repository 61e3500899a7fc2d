"""Record a code change that alters no number: `dvc commit` every stage of which only code changed.

First the smoke graph (tests/smoke_graph.py) runs in a clone of HEAD and in the working tree. The
change is refused if a weight or score file has other bytes, or if settings or outputs of a stage
have changed: that stage must run again.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CODE, WEIGHTS = ("featcal/", "reproduction/"), "reproduction/mini/models"
REMADE = ("page", "book")  # made again in seconds, and the smoke graph does not look at them
SMOKE = """
import json, sys
from pathlib import Path
from smoke_graph import run_smoke_graph
print(json.dumps(run_smoke_graph(Path(sys.argv[1]))))
"""


class Refused(Exception):
    """A change that cannot be accepted: the reason and the way out."""


def output(*command: str, **options: Any) -> str:
    """Return a command's output; its errors go to the terminal."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, **options
    )
    if done.returncode:
        raise Refused(f"`{' '.join(command)}` failed with exit code {done.returncode}")
    return done.stdout


def only_code_changed(status: dict[str, list[Any]]) -> list[str]:
    """Return the stages to record.

    Raises: Refused for a stage with changed settings, data, command or outputs.
    """
    stages = sorted(stage for stage in status if re.split("[@_]", stage)[0] not in REMADE)
    for stage in stages:
        for entry in status[stage]:
            deps = entry.get("changed deps", {}) if isinstance(entry, dict) else {}
            other = [name for name in deps if not name.startswith(CODE) or name.startswith(WEIGHTS)]
            if not deps or other:
                what = ", ".join(other) or json.dumps(entry)
                raise Refused(
                    f"{stage} differs by more than its code ({what}).\n  - run it: dvc repro {stage}"
                )
    return stages


def smoke(tree: Path, folder: Path) -> dict[str, str]:
    """Return the sha256 of every file of the smoke graph, run by the code of `tree` in `folder`."""
    own = {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}", "OMP_NUM_THREADS": "1"}
    folder.mkdir()
    text = output(sys.executable, "-c", SMOKE, str(folder), cwd=tree, env=os.environ | own)
    hashes: dict[str, str] = json.loads(text.splitlines()[-1])
    return hashes


def require_same(before: dict[str, str], after: dict[str, str]) -> None:
    """Raise Refused, with their names, if files have other bytes."""
    changed = sorted({name for name, _ in before.items() ^ after.items()})
    if changed or not before:
        names = "\n".join(f"  {name}" for name in changed) or "  (the smoke graph wrote nothing)"
        raise Refused(
            f"this change alters numbers; the smoke graph now writes other bytes:\n{names}\n  - run: dvc repro"
        )


def accept() -> None:
    stages = only_code_changed(json.loads(output("dvc", "status", "--json", cwd=ROOT) or "{}"))
    if not stages:
        print("accept: nothing to record; make book remakes the pages")
        return
    print(
        f"accept: comparing the smoke graph of HEAD with that of the working tree, for {', '.join(stages)}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="featcal-accept-") as temporary:
        clone = Path(temporary, "clone")
        output("git", "clone", "--quiet", str(ROOT), str(clone))
        before = smoke(clone, Path(temporary, "before"))
        after = smoke(ROOT, Path(temporary, "after"))
    require_same(before, after)
    output("dvc", "commit", "--force", *stages, cwd=ROOT)
    print(f"accept: {len(before)} files equal; recorded")


def main() -> int:
    try:
        accept()
    except Refused as refused:
        print(f"accept: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
