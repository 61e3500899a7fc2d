"""Stage `evaluate`: scores of every model of a role and pool, and small files that explain them."""

from collections.abc import Iterator, Sequence
from typing import Any

from featcal.files import atomic_folder, read_json, write_json
from reproduction.engine import spec
from reproduction.engine.context import Setup, load_setup
from reproduction.engine.samples import seen_rows
from reproduction.engine.score import example, score
from reproduction.experiments import CHAT_POOL
from reproduction.results import CURVES, EXAMPLE, SCORES, SEEN, write_rows, write_scores

REFERENCES = ("base", "expert", "multitask", "merged")  # methods that FeatCal is compared with
POINTS = 20  # of a loss curve
DRAWN_BY, NEW_TOKENS = 42, 48  # the example: seed of its question, length of an answer


def run(key: str) -> None:
    """Write outputs/<suite>/scores/<key>/: scores, correct samples, references, loss curves and
    settings; for encoders also the test samples that mergers and adapters saw; for models that chat
    one question with their answers.
    """
    setup = load_setup(key)
    context, models = setup.context, list[spec.ModelSpec]()
    played = setup.plays
    with (
        context.recorded("evaluate", key),
        atomic_folder(context.layout.found("scores", key)) as out,
    ):
        if played:
            models = spec.specs(setup)
        scores = score(f"evaluate {key}", setup, models) if played else {}
        rows = [row for own in scores.values() for row in own]
        write_scores(out / "scores.csv", rows)
        shown = [{c: row[c] for c in SCORES} for row in rows if row["method"] in REFERENCES]
        write_rows(out / "references.csv", shown, SCORES)
        if not setup.of_texts:
            draws = [m.draw for m in models if m.draw is not None and m.method != "featcal"]
            write_rows(out / "seen.csv", seen_rows(setup, draws, rows), SEEN)
        write_rows(out / "curves.csv", _curves(setup, models), CURVES)
        write_json(out / "settings.json", _settings(setup))
        if setup.pool == CHAT_POOL:
            write_rows(out / "example.csv", _examples(setup, models), EXAMPLE)


def _curves(setup: Setup, models: Sequence[spec.ModelSpec]) -> Iterator[dict[str, Any]]:
    """Yield the loss averaged over consecutive steps: the sum over tasks that a merger minimises, or
    the mean over tasks of adapters.
    """
    for model in models:
        loss, words = None, {name: value for name, value in model.words.items()}
        assert model.folder is not None or model.method == "expert"
        if model.method == "merged" and model.folder is not None:
            record = model.folder / "merge.json"
            loss = read_json(record).get("loss") if record.is_file() else None
            words["seed"] = model.draw.seed if model.draw else ""
        elif model.corrects and model.folder is not None:
            by_task = read_json(model.folder / "adapters.json")["loss"].values()
            loss = [sum(losses) / len(losses) for losses in zip(*by_task, strict=True)]
        if isinstance(loss, list) and loss:  # mergers without steps record something else, or none
            length = -(-len(loss) // POINTS)
            for start in range(0, len(loss), length):
                part = loss[start : start + length]
                point = {"step": start + len(part), "loss": float(sum(part) / len(part))}
                yield {**setup.words, **words, **point}


def _examples(setup: Setup, models: Sequence[spec.ModelSpec]) -> Iterator[dict[str, Any]]:
    """Yield the answers of base, merged and calibrated models to one drawn question."""
    shown = [m for m in models if m.method in ("base", "merged", "featcal")]
    jobs = {m.name: (setup, m.folder, DRAWN_BY, NEW_TOKENS) for m in shown}
    found = setup.context.run(f"example {setup.key}", example, jobs)
    for model in shown:
        question, answer = found[model.name]
        drawn = {"drawn_by": DRAWN_BY, "question": question, "answer": answer}
        yield {**setup.words, **model.words, **drawn}


def _settings(setup: Setup) -> dict[str, Any]:
    """Return the resolved settings of all scored models."""
    experiments, suite, words = (
        setup.context.experiments,
        setup.context.suite,
        (setup.role, setup.pool),
    )
    merged = {
        key: {
            "method": run.method,
            **(run.options or {}),
            **({"draw": run.draw.model_dump()} if run.draw else {}),
        }
        for key, run in experiments.merged_in(*words).items()
    }
    shared = experiments.multitask.get(setup.key)
    return {
        "suite": {"name": suite.name, "data": suite.data.model_dump(), "heads": suite.heads},
        "multitask": {setup.key: shared.model_dump()} if shared else {},
        "merge": merged,
        "calibrate": {k: c.model_dump() for k, c in experiments.calibrated_in(*words).items()},
        "adapt": {k: a.model_dump() for k, a in experiments.adapted_in(*words).items()},
    }
