"""Descriptions of text tasks for the report: rows, an example, and the scores behind the choice."""

import json

from datasets import Dataset

from reproduction.mini.language.domains import MEASURED, measured
from reproduction.prepare.texts import TextSource, described_task, write_text_sources

ROWS = dict(
    sst2={"sentence": ["fine"], "label": [1], "idx": [0]},
    math={"prompt": ["1+1="], "completion": ["2\n"]},
    gsm8k={"prompt": ["one and one?\n"], "target": ["1+1=2"]},
)


def test_a_task_is_told_by_its_first_prompt_and_answer(tmp_path):
    for task, answer in {"sst2": "positive", "math": "2", "gsm8k": "1+1=2"}.items():
        (tmp_path / task).mkdir()
        Dataset.from_dict(ROWS[task]).to_parquet(str(tmp_path / task / "test.parquet"))
        named = {"location": task, "kind": "folder", "paper_name": task, "description": "A task."}
        source = TextSource(**named, splits={"test": "test"})
        write_text_sources(tmp_path, {task: source})
        found = described_task(tmp_path, task, source)
        assert found["rows"] == {"test": 1} and found["description"] == "A task."
        assert found["example"]["answer"] == answer and found["example"]["prompt"]


def test_of_texts_on_the_hub_nothing_is_fetched(tmp_path):
    named = {"location": "nyu-mll/glue", "kind": "hub", "paper_name": "CoLA", "config": "cola"}
    source = TextSource(**named, splits={"train": "train"}, revision="abc")
    found = described_task(tmp_path, "cola", source)
    assert "rows" not in found and found["location"] == "nyu-mll/glue"


def test_both_records_of_the_choice_are_read_in_one_form(tmp_path):
    glue = {"flan_t5_base": {"base": {"cola": 60.0}, "task_arithmetic 0.3": {"cola": 70.0}}}
    domains = {
        "llama_3b": {"validation": {"coding": {"ifeval": 50.0, "average": 40.0}}, "rows": 200}
    }
    assert measured(tmp_path) == {}
    for name, record in zip(MEASURED, (glue, domains), strict=True):
        (tmp_path / name).write_text(json.dumps(record))
    assert measured(tmp_path) == glue | {"llama_3b": {"coding": {"ifeval": 50.0}}}
