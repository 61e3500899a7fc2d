"""Build the tables of the real language model: its scores, and one answer, before and after
calibration.
"""

from html import escape

from reproduction.report.evidence import GREEDY, Evidence, expert_tasks, read_json, select
from reproduction.report.html import PageOutput, estimated, note, table
from reproduction.report.paper import LANGUAGE
from reproduction.report.statistics import Estimate, estimate, noise
from reproduction.report.tables import MERGERS, REFERENCES, Key
from reproduction.results import project_root

PLAIN = "plain_text"
EXAMPLE = "reproduction/real_language/example.json"  # scripts/chat_example.py
MISSING = note("○ not run: no results of the real language model.")
WAYS = {
    ("featcal", "paper"): "w/ FeatCal, as printed for the smaller Llama",
    ("featcal", "paper_8b"): "w/ FeatCal, as printed for the larger Llama",
    ("anchor", "paper"): "its anchor alone",
}


def parts(suite: str, key: Key) -> list[Estimate | None]:
    """Return the means of one model: right answers by likelihood and greedily on the experts' tasks,
    by likelihood on the others, and the log-likelihood of plain texts.
    """
    scores = Evidence(suite, *LANGUAGE).every_score
    own = expert_tasks(scores)
    unseen = {task for task in scores["task"] if not task.endswith(GREEDY)} - own - {PLAIN}
    rows = select(scores, dict(zip(("upstream", "method", "setting"), key, strict=True)))
    groups = (own, {task + GREEDY for task in own}, unseen, {PLAIN})
    return [estimate(rows[rows["task"].isin(tasks)]) for tasks in groups]


def answers(suite: str) -> PageOutput:
    """List every model's means, with the changes against the merged model that it starts from."""
    if not Evidence(suite, *LANGUAGE).was_run:
        return PageOutput(MISSING)
    lines = [(name, ("", method, "")) for method, name in REFERENCES.items()]
    for merger, name in MERGERS.items():
        lines.append((name, (merger, "merged", "")))
        lines += [(label, (merger, *way)) for way, label in WAYS.items()]
    rows = []
    for name, key in lines:
        found = parts(suite, key)
        if not any(found):
            continue
        start = parts(suite, (key[0], "merged", "")) if key[1:] in WAYS else []
        cells = [
            f"{one.mean:.2f}" if one and place == 3 else estimated(one)
            for place, one in enumerate(found)
        ]
        for place, (one, before) in enumerate(zip(found[:3], start, strict=False)):
            if one and before:
                change = f"{one.mean - before.mean:+.1f} ± {noise(one, before):.1f}"
                cells[place] += f"<small>{change}</small>"
        rows.append(("fc-merger" if key[1] == "merged" else "", [name, *cells]))
    head = ["SmolLM2-135M-Instruct", "By likelihood", "Greedy", "Unseen tasks", "Plain text"]
    caption = (
        "Right answers (%) on the experts’ tasks, and on tasks that no expert saw; log-likelihood per token. "
        "Small: change against the merged model ± two standard errors"
    )
    return PageOutput(table(head, rows, caption, "fc-long"))


def example(suite: str) -> PageOutput:
    """Show one drawn question, and its answers before and after merging and calibration."""
    found = read_json(project_root() / EXAMPLE)
    if found.get("suite") != suite:
        return PageOutput(MISSING)
    rows = []
    for one in found["answers"]:
        way, merger = (one["method"], one["setting"]), MERGERS.get(one["upstream"])
        name = WAYS.get(way) or merger or REFERENCES[one["method"]]
        rows.append(("", [name, escape(one["answer"])]))
    caption = (
        f"One question, drawn with seed {found['seed']}: “{escape(found['question'])}”. "
        f"Greedy answers, cut after {found['new_tokens']} tokens"
    )
    return PageOutput(table(["SmolLM2-135M-Instruct", "Answer"], rows, caption, "fc-words"))
