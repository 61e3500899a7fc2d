"""The command line where no person looks: completion, JSON, exit codes in every help, no bars and no colours."""

import json
import os
import subprocess
import sys

from test_cli import CALIBRATE, DATA, EVALUATE, MERGE, models, ready  # noqa: F401 - two fixtures

from featcal.cli import main as cli


def featcal(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "featcal.cli", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | environment)


def test_every_command_that_reports_does_so_in_json_too(models, capsys):  # noqa: F811
    def told(*arguments):
        assert cli.main([*arguments, "--json", "--quiet"][: None if arguments[0] not in ("inspect", "doctor") else -1]) == 0
        return json.loads(capsys.readouterr().out)

    assert told(*MERGE[:-1], "fused")["method"] == "task_arithmetic"
    assert [block["name"] for block in told(*CALIBRATE)["blocks"]] == ["vision.00", "vision.01"]
    plan = [part for part in CALIBRATE[:9] if part != "calibrate"]
    assert told("plan", *plan)["host_bytes"] > 0
    inspected = told("inspect", "new")
    assert inspected["calibration"]["stacks"][0]["blocks"] == 2 and inspected["stored_as"] == {"float32": inspected["tensors"]}
    assert told("convert", "base", "--out", "other") == {"folder": "other", "form": "open_clip"}
    evaluated = told(*EVALUATE, "--template", "a photo of a {}")
    assert evaluated["tasks"]["mnist"]["images"] == 6 and 0 <= evaluated["average"] <= 100
    assert "python" in told("doctor")["machine"]


def test_quiet_prints_results_alone_and_colours_need_a_terminal(models):  # noqa: F811
    done = featcal(*CALIBRATE, "--quiet")
    assert done.returncode == 0 and done.stderr == "" and "calibrated model: new" in done.stdout
    done = featcal(*CALIBRATE, "--force", *DATA[:0])
    assert done.returncode == 0 and "vision.01" in done.stderr and "\x1b" not in done.stderr + done.stdout
    assert "\r" not in done.stderr and "%|" not in done.stderr
