"""Stage `multitask`: one model trained on all tasks of a role and pool, the usual upper reference
of a merged one.
"""

from reproduction.prepare.experts import MultitaskJob, write_multitask
from reproduction.stages.context import load_context, not_run, pick, recorded
from reproduction.stages.workers import fan_out


def run(key: str) -> None:
    """Write outputs/<suite>/multitask/<key>/; an empty folder where the suite has no such model."""
    context = load_context()
    chosen, layout, suite = (
        pick("multitask", context.experiments.multitask, key),
        context.layout,
        context.suite,
    )
    with recorded(context, "multitask", key):
        if chosen is None or not context.plays(chosen.role, chosen.pool):
            not_run(context, f"multitask {key}", layout.multitask(key))
            return
        recipe = (
            suite.sentences.fine_tune if chosen.role in suite.sentences.roles else suite.fine_tune
        )
        fine_tune = recipe.but(steps=chosen.steps) if chosen.steps else recipe
        job = MultitaskJob(
            suite.tasks_of(chosen.role, chosen.pool),
            chosen.model,
            fine_tune,
            chosen.seed,
            suite.device,
        )
        folders = (
            layout.prepared(chosen.role, chosen.pool),
            layout.data_of(chosen.role),
            layout.pins,
            layout.multitask(key),
        )
        for _ in fan_out(
            "multitask", write_multitask, {key: (job, *folders)}, min(suite.workers, 1)
        ):
            pass
