"""Where everything of one suite lies; the only place that spells out paths below the project's
folder.

Above the line (outputs/): weights and caches. Below it (results/, book/): small files that are in
git.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reproduction.experiments.runs import Pool


@dataclass(frozen=True)
class Layout:
    """Paths of one suite below the project's root.

    pools: tasks by role and by the size of each pool that is prepared. An expert lies in the
    smallest one with its task, so that
           none is made twice.
    sentences: of sentence encoders, by role, the folder of their texts below the root.
    aside: a folder that stands for outputs/<suite>/ while a study makes what it forgets.
    """

    root: Path
    suite: str
    pools: Mapping[str, Mapping[Pool, tuple[str, ...]]]
    sentences: Mapping[str, str] = field(default_factory=dict)
    aside: Path | None = None

    @property
    def outputs(self) -> Path:
        return self.aside or self.root / "outputs" / self.suite

    @property
    def results(self) -> Path:
        return self.root / "results" / self.suite

    @property
    def pins(self) -> Path:
        """Hub names of the suite and the commits they were resolved to."""
        return self.root / "suites" / f"{self.suite}.pins.json"

    @property
    def data(self) -> Path:
        return self.outputs / "data"

    def data_of(self, role: str) -> Path:
        """Where `load_task` finds what a role sees: images, or the texts of sentence encoders,
        which are in git.
        """
        return self.root / self.sentences[role] if role in self.sentences else self.data

    @property
    def texts(self) -> Path:
        """Texts of the tasks of language models."""
        return self.outputs / "texts"

    def prepared(self, role: str, pool: Pool) -> Path:
        return self.outputs / "prepared" / f"{role}-{pool}"

    def base(self, role: str, pool: Pool) -> Path:
        return self.prepared(role, pool) / "base"

    def expert(self, role: str, pool: Pool, task: str) -> Path:
        return self.prepared(role, self.home(role, pool, task)) / "experts" / task

    def home(self, role: str, pool: Pool, task: str) -> Pool:
        """The smallest pool of a role that holds a task of this pool."""
        if isinstance(pool, str):
            return pool
        smaller = {
            size: tasks
            for size, tasks in self.pools[role].items()
            if isinstance(size, int) and size <= pool
        }
        return min(size for size, tasks in smaller.items() if task in tasks)

    def multitask(self, key: str) -> Path:
        """One model trained on all tasks of a role and pool."""
        return self.outputs / "multitask" / key

    def heads(self, role: str, pool: Pool) -> Path:
        return self.prepared(role, pool) / "heads.safetensors"

    def merged(self, key: str) -> Path:
        return self.outputs / "merged" / key

    def calibrated(self, key: str, seed: int) -> Path:
        return self.outputs / "calibrated" / key / f"seed{seed}"

    def adapted(self, key: str, setting: str = "", seed: int | None = None) -> Path:
        """Adapters of one setting and seed; the folder of all of them without."""
        folder = self.outputs / "adapted" / key
        return folder / setting / f"seed{seed}" if setting else folder

    def ablated(self, key: str, name: str = "") -> Path:
        """One control; the folder of all of them without a name."""
        return self.outputs / "ablated" / key / name

    def found(self, kind: str, key: str) -> Path:
        """Small files of one kind: scores, drift, or what a study found."""
        return self.outputs / kind / key

    def gathered(self, kind: str, key: str) -> Path:
        """The same among the results, with the record of the run."""
        return self.results / kind / key

    def run(self, verb: str, key: str | None) -> Path:
        return self.outputs / "run" / f"{verb}{'-' + key if key else ''}.json"

    def unfinished(self, fingerprint: str) -> Path:
        """Finished parts of an unfinished stage: outside the outputs, which DVC removes before it
        runs a stage again.
        """
        return self.root / ".featcal" / self.suite / fingerprint
