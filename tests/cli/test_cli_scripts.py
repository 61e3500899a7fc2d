"""The command line where no person looks: completion, JSON, exit codes in every help, no bars and
no colours.
"""

import json

from test_cli import CALIBRATE, EVALUATE, MERGE, models, ready  # noqa: F401 - two fixtures

from featcal.cli import main as cli


def test_every_command_that_reports_does_so_in_json_too(models, capsys):  # noqa: F811
    def told(*arguments):
        assert cli.main(["--quiet", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert told(*MERGE[:-1], "fused")["method"] == "task_arithmetic"
    assert [block["name"] for block in told(*CALIBRATE)["blocks"]] == ["vision.00", "vision.01"]
    plan = [part for part in CALIBRATE[:9] if part != "calibrate"]
    assert told("plan", *plan)["host_bytes"] > 0
    inspected = told("inspect", "new", "--plan")
    assert inspected["calibration"]["stacks"][0]["blocks"] == 2 and inspected["stored_as"] == {
        "float32": inspected["tensors"]
    }
    assert told("convert", "base", "--out", "other") == {"folder": "other", "form": "open_clip"}
    evaluated = told(*EVALUATE, "--template", "a photo of a {}")
    assert evaluated["tasks"]["mnist"]["images"] == 6 and 0 <= evaluated["average"] <= 100
    assert "python" in told("doctor")["machine"]


def test_quiet_prints_results_alone(models, capfd):  # noqa: F811
    assert cli.main(["--quiet", *CALIBRATE]) == 0
    told = capfd.readouterr()
    assert told.err == "" and "calibrated model: new" in told.out


def test_colours_and_bars_need_a_terminal(models, capsys):  # noqa: F811
    assert cli.main(CALIBRATE) == 0
    told = capsys.readouterr()
    assert "vision.01" in told.err and "calibrated model: new" in told.out
    assert not [sign for sign in ("\x1b", "\r", "%|") if sign in told.err + told.out]
