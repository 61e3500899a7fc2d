"""Build the tables of the real language model: its scores, and one answer, before and after
calibration.
"""

from html import escape

from reproduction.report.evidence import GREEDY, Evidence, read_json, select
from reproduction.report.html import PageOutput, change, estimated, listed
from reproduction.report.paper import LANGUAGE
from reproduction.report.statistics import Estimate, estimate
from reproduction.report.tables import MERGERS, REFERENCES, Key
from reproduction.results import project_root

PLAIN = "plain_text"
EXAMPLE = "reproduction/real_language/example.json"  # scripts/chat_example.py
MISSING = "no results of the real language model"
WAYS = {
    ("featcal", "paper"): "w/ FeatCal, as printed for the smaller Llama",
    ("featcal", "paper_8b"): "w/ FeatCal, as printed for the larger Llama",
    ("anchor", "paper"): "its anchor alone",
}


def parts(ours: Evidence, key: Key) -> list[Estimate | None]:
    """Return the means of one model: right answers by likelihood and greedily on the experts' tasks,
    by likelihood on the others, and the log-likelihood of plain texts.
    """
    scores, likely = ours.every_score, ours.own_tasks
    greedy = [f"{task}{GREEDY}" for task in likely]
    unseen = {task for task in scores["task"] if not task.endswith(GREEDY)} - {*likely, PLAIN}
    rows = select(scores, dict(zip(("upstream", "method", "setting"), key, strict=True)))
    groups = (likely, greedy, unseen, [PLAIN])
    return [estimate(rows[rows["task"].isin(tasks)]) for tasks in groups]


def answers(suite: str) -> PageOutput:
    """List every model's means, with the changes against the merged model that it starts from."""
    ours, rows = Evidence(suite, *LANGUAGE), []
    keys = {("", method, ""): name for method, name in REFERENCES.items()}
    for merger, name in MERGERS.items():
        keys[merger, "merged", ""] = name
        keys |= {(merger, *way): label for way, label in WAYS.items()}
    for key, name in keys.items():
        found = parts(ours, key)
        if not any(found):
            continue
        cells = [estimated(one) for one in found[:3]]
        if key[1:] in WAYS:
            starts = parts(ours, (key[0], "merged", ""))
            for place, (one, before) in enumerate(zip(found[:3], starts[:3], strict=True)):
                cells[place] += f"<small>{change(one, before)}</small>" if one and before else ""
        cells.append(f"{found[3].mean:.2f}" if found[3] else "–")
        rows.append(("fc-merger" if key[1] == "merged" else "", [name, *cells]))
    head = ["SmolLM2-135M-Instruct", "By likelihood", "Greedy", "Unseen tasks", "Plain text"]
    caption = (
        "Right answers (%) on the experts’ tasks, and on tasks that no expert saw; log-likelihood per token. "
        "Small: change against the merged model ± two standard errors"
    )
    return listed(head, rows, caption, "fc-long", MISSING)


def example(suite: str) -> PageOutput:
    """Show one drawn question, and its answers before and after merging and calibration."""
    found, rows = read_json(project_root() / EXAMPLE), []
    for one in found.get("answers", []) if found.get("suite") == suite else []:
        way, merger = (one["method"], one["setting"]), MERGERS.get(one["upstream"])
        name = WAYS.get(way) or merger or REFERENCES[one["method"]]
        rows.append([name, escape(one["answer"])])
    caption = (
        f"One question, drawn with seed {found.get('seed')}: “{escape(found.get('question', ''))}”. "
        f"Greedy answers, cut after {found.get('new_tokens')} tokens"
    )
    return listed(["SmolLM2-135M-Instruct", "Answer"], rows, caption, "fc-words", MISSING)
