"""The command line where no person looks: completion, JSON, exit codes in every help, no bars and no colours."""

import json
import os
import subprocess
import sys

import pytest
from test_cli import CALIBRATE, DATA, EVALUATE, MERGE, models, ready  # noqa: F401 - two fixtures

from featcal.cli import main as cli

GIVEN = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # the shell is named, not found out
COMMANDS = [command.callback.__name__ for command in cli.app.registered_commands]


def featcal(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "featcal.cli", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example_and_the_exit_codes(command, capsys):
    assert cli.main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"featcal {command} " in printed and "Example" in printed and "Exit codes" in printed and "130" in printed


@pytest.mark.parametrize(("shell", "said"), [("bash", "COMP_WORDS"), ("zsh", "compdef"), ("fish", "complete --command")])
def test_the_completion_of_a_shell_is_shown(shell, said):
    done = featcal("--show-completion", shell, **GIVEN)
    assert done.returncode == 0 and said in done.stdout and "_FEATCAL_COMPLETE" in done.stdout


def test_completion_is_installed_in_the_home_folder(tmp_path):
    (tmp_path / ".bashrc").write_text("")
    assert featcal("--install-completion", "bash", HOME=str(tmp_path), **GIVEN).returncode == 0
    assert "featcal" in (tmp_path / ".bashrc").read_text()


def test_commands_and_options_are_completed():
    words = {"_FEATCAL_COMPLETE": "complete_bash", "COMP_CWORD": "1", "COMP_WORDS": "featcal cal"}
    assert featcal(**words).stdout.split() == ["calibrate"]
    words |= {"COMP_CWORD": "2", "COMP_WORDS": "featcal calibrate --rec"}
    assert featcal(**words).stdout.split() == ["--recipe"]


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
    done = featcal("calibrate", NO_COLOR="1", FORCE_COLOR="")
    assert done.returncode == 2 and "\x1b" not in done.stderr
