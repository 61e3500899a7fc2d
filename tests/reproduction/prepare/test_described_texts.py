"""Descriptions of text tasks for the report: rows and an example."""

from datasets import Dataset

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
