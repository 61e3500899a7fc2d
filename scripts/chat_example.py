"""Put one question to the real language model before and after merging and calibration. Writes
reproduction/real_language/example.json.

The question is drawn by a seed out of the plain texts, which nothing was trained on, and put by the
chat template without a system message; answers are greedy. Needs the calibrated models:
dvc repro pipeline/models/dvc.yaml:calibrate@smollm2-chat
"""

from pathlib import Path

from featcal.data.batches import draw_indices
from featcal.files import write_json
from featcal.models.load import load_tokenizer
from reproduction.engine.context import load_setup
from reproduction.engine.spec import specs
from reproduction.language.generation import answer
from reproduction.prepare.texts import load_texts
from reproduction.results import PLAIN

SEED, NEW_TOKENS = 42, 48
OUT = Path(__file__).parents[1] / "reproduction" / "real_language" / "example.json"


def main() -> None:
    """Ask the base, the merged model and the calibrated one."""
    setup = load_setup("smollm2-chat")
    texts = load_texts(setup.texts, PLAIN, "test")
    question = texts[int(draw_indices(PLAIN, len(texts), 1, SEED)[0])].target or ""
    chain = [("", ""), ("task_arithmetic", ""), ("task_arithmetic", "paper")]
    models = [m for m in specs(setup) if (m.upstream, m.setting) in chain and m.folder]
    tokenizer, answers = load_tokenizer(setup.base), []
    for model in (m for m in models if m.method in ("base", "merged", "featcal")):
        text = answer(setup.load(model.folder), tokenizer, question, NEW_TOKENS)
        key = {name: getattr(model, name) for name in ("upstream", "method", "setting")}
        answers.append({**key, "answer": text})
    record = {"seed": SEED, "new_tokens": NEW_TOKENS, "question": question, "answers": answers}
    write_json(OUT, {"suite": setup.context.suite.name, **record})


if __name__ == "__main__":
    main()
