"""The dress rehearsal: the whole suite `paper` on a hub of our own, in a temporary copy of the
project (make rehearsal).

  python scripts/rehearsal.py [stage ...]     all stages in the order of dvc.yaml, or those whose
  names begin so
  python scripts/rehearsal.py --full-size     full-size models with random weights on a CUDA GPU:
  times and memory

The hub is a server on the loopback address, which HF_ENDPOINT names to the real clients. It has
every repository of the suite under its own name, with tiny random models and few rows; params.yaml
asks for fewer samples and steps (tests/rehearsal_run.py lists them). Scores mean nothing; that
every file is found, read, computed with and shown is what is rehearsed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {  # generated programs are let run, since the hub's metric only reads them
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0", "HF_ALLOW_CODE_EVAL": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}  # fmt: skip
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def rehearse(stages: list[str]) -> int:
    """Run the stages, and print what was run and read as a table."""
    from hub_server import TOKEN, HubServer
    from rehearsal_rows import gated, paper_hub, punkt_tab
    from rehearsal_run import RECORD, lay_out

    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="featcal-rehearsal-") as temporary:
        work = Path(temporary, "project")
        work.mkdir()
        repositories = paper_hub(Path(temporary, "hub"))
        # before nltk is imported, here and there
        os.environ |= ENVIRONMENT | punkt_tab(Path(temporary, "nltk_data"))
        skipped = lay_out(work)
        report(f"{len(repositories)} repositories, made in {time.perf_counter() - start:.0f} s")
        with HubServer(repositories, gated(repositories)) as hub:
            hub_environment = hub.environment(Path(temporary, "cache")) | {"HF_TOKEN": TOKEN}
            command = [sys.executable, str(ROOT / "tests" / "rehearsal_run.py"), str(work), *stages]
            code = subprocess.run(command, env=os.environ | hub_environment, check=False).returncode
        if code:
            report(f"stopped with exit code {code}; the reason is above")
            return code
        record = json.loads((work / RECORD).read_text())
    files = (request.split()[1] for request in hub.seen if "/resolve/" in request)
    read = {file.partition("/resolve/")[0] for file in files}
    by_verb: Counter[str] = Counter()
    for stage, took in record["stages"]:
        by_verb[stage.partition("@")[0]] += took
    longest = ", ".join(f"{verb} {took:.0f} s" for verb, took in by_verb.most_common(5))
    seconds = time.perf_counter() - start
    rows = {
        "repositories served": f"{len(repositories)}, of which {len(read)} were read",
        "stages run": f"{len(record['stages'])} (longest: {longest})",
        "pages executed": str(record["pages"]),
        "public tests skipped": "; ".join(skipped) or "none",
        "seconds": f"{seconds:.0f}, of the processor {record['cpu']:.0f}",
    }
    for name, value in rows.items():
        print(f"{name:22} {value}")
    return 0


def report(text: str) -> None:
    print(f"rehearsal: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    about = "beginnings of stages' names, such as prepare or page@table01; all without"
    parser.add_argument("stages", nargs="*", help=about)
    about = "time full-size models with random weights on a CUDA GPU"
    parser.add_argument("--full-size", action="store_true", help=about)
    args = parser.parse_args()
    if args.full_size:
        from full_size import report

        return report()
    return rehearse(args.stages)


if __name__ == "__main__":
    sys.exit(main())
