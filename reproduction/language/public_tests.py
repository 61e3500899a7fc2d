"""The paper's six tests as lm-evaluation-harness loads them, and whether this machine has what they
need.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from featcal.errors import BadEnvironment, UnknownKey
from reproduction.data.public import PUBLIC, PublicTest
from reproduction.language.harness import Loaded, prepared, require_harness, silent
from reproduction.language.requirements import fetch_punkt, lacking, require_antlr

# by the columns of the paper's tables
PAPER = {
    key: key
    for key in ("math500", "gsm8k", "humaneval_plus", "mbpp_plus", "ifeval", "arc_challenge")
}
LANGUAGE_SEED = 0
FETCHED = "data sets, the metric code_eval and nltk's punkt_tab are fetched on first use: run once with HF_HUB_OFFLINE=0 and a network"


def load_public(
    tests: Mapping[str, str] = PAPER, revisions: Mapping[str, str] | None = None
) -> dict[str, Loaded]:
    """The tests as the harness loads them, data included: what is lacking is found here, before a
    model has run for hours.

    tests:     by what the results call the test, a name of PUBLIC.
    revisions: the commits of their data sets, by the same keys; left out, whatever is there now.
    Raises: BadEnvironment naming everything that is lacking, of all tests at once; UnknownKey.
    """
    unknown = next((name for name in tests.values() if name not in PUBLIC), None)
    if unknown:
        raise UnknownKey("public tests", unknown, list(PUBLIC))
    require_harness()
    loaded, problems, ways_out = {}, [], [FETCHED]
    for key, name in tests.items():
        test = PUBLIC[name]
        fetch_punkt(test)
        if lacks := lacking(test):
            problems.append(f"{test.task}: {', '.join(lack.what for lack in lacks)}")
            ways_out += [lack.way_out for lack in lacks]
            continue
        try:
            loaded[key] = Loaded(
                _load(test, (revisions or {}).get(key)), f"{test.metric},{test.filter}", test.runs
            )
        except Exception as error:  # the harness, its tasks and their data sets raise anything
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            problems.append(f"{test.task}: {said.rstrip('.;')[:160]}")
    if problems:
        raise BadEnvironment("public tests", ";\n".join(problems), *dict.fromkeys(ways_out))
    return loaded


def _load(test: PublicTest, revision: str | None) -> Any:
    """The harness's task, its data set at one commit: a task file that includes the harness's
    own.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    if "antlr4" in test.needs:
        require_antlr()
    if (
        "langdetect" in test.needs
    ):  # it guesses by chance; answers keep their scores only with a seed
        import langdetect

        langdetect.DetectorFactory.seed = LANGUAGE_SEED
    included: dict[str, Any] = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / test.file),
        "task": test.task,
    }
    if revision:
        included["dataset_kwargs"] = {"revision": revision}
    with silent(), TemporaryDirectory() as folder:
        file = Path(folder, "pinned.yaml")
        file.write_text(yaml.safe_dump(included), "utf-8")
        manager = TaskManager(
            include_defaults=False
        )  # to index all of the harness's tasks takes ten seconds
        return prepared(manager.load([str(file)])["tasks"][test.task])
