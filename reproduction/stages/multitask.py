"""Stage `multitask`: one model trained on all tasks of a role and pool."""

from typing import Any

from reproduction.engine.context import load_setup, pick
from reproduction.prepare.experts import MultitaskJob, write_multitask


def run(key: str) -> None:
    """Write outputs/<suite>/multitask/<role>-<pool>/."""
    setup = load_setup(key)
    context, suite = setup.context, setup.context.suite
    chosen, out = pick("multitask", context.experiments.multitask, key), setup.folder("multitask")
    with context.recorded("multitask", key):
        if chosen is None or not setup.plays:
            context.not_run(f"multitask {key}", out)
            return
        sentences = setup.role in suite.sentences.roles
        recipe: Any = suite.sentences.fine_tune if sentences else suite.fine_tune
        recipe = recipe.but(steps=chosen.steps) if chosen.steps else recipe
        job = MultitaskJob(setup.tasks, chosen.model, recipe, chosen.seed, suite.device)
        data, pins = context.layout.data_of(setup.role), context.layout.pins
        context.run("multitask", write_multitask, {key: (job, setup.base.parent, data, pins, out)})
