"""``shardwise plan``: what it prints and saves, and what it says of wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.plans.load import load_plan

TARGET = ("plan", "zoo:mlp:tiny", "--topology", "v5e:2x2")
SHORT = ("--evaluations", "60")


def test_the_summary_fits_a_screen_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TARGET, "--mesh", "data=4", *SHORT]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step on data 4: v5e:2x2")
    assert "memory" in out and "Found by mcts: " in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert len(out.splitlines()) < 40


def test_a_plan_is_saved_and_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main([*TARGET, "--mesh", "data=4", "--output", str(file), "--json", *SHORT]) == 0
    out = capsys.readouterr().out
    assert out == file.read_text()
    assert load_plan(file).mesh.names == ("data",)


def test_a_page_is_written_with_what_a_saved_plan_does_not_keep(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert main([*TARGET, "--mesh", "data=4", "--report", str(file), *SHORT]) == 0
    text = file.read_text()
    assert '"made_here":true' in text and "A saved plan keeps" not in text


def test_an_open_mesh_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TARGET, "--mesh", "data=?,model=2", *SHORT]) == 0
    assert "data 2 × model 2" in capsys.readouterr().out


def test_progress_is_for_terminals_or_for_who_asks(capsys: pytest.CaptureFixture[str]) -> None:
    where = [*TARGET, "--mesh", "data=4", *SHORT]
    for option in ([], ["--quiet"]):
        assert main([*where, *option]) == 0
        assert not capsys.readouterr().err
    assert main([*where, "--verbose"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(" evaluated, best " in line for line in lines)


@pytest.mark.parametrize("option", ["--output", "--report"])
def test_nothing_is_searched_if_the_plan_cannot_be_kept(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwise.cli.programs.load_target", lambda _: pytest.fail("there is no need to look"))
    for file, why in (
        ("/nowhere/x.json", "there is no folder /nowhere"),
        ("/proc/x", "No such file"),
        (".", "a folder"),
    ):
        assert main([*TARGET, option, file]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"shardwise: cannot write {file}: ") and why in err and err.count("\n") == 1


def test_what_comes_next_is_a_command_that_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a plan.json"
    assert main([*TARGET, *SHORT, "--output", str(file)]) == 0
    assert capsys.readouterr().out.endswith(
        f"Saved. Next:\n  shardwise code '{file}'\n  shardwise verify '{file}' zoo:mlp:tiny\n"
    )
    assert main([*TARGET, *SHORT, "--all"]) == 0
    said = capsys.readouterr().out.partition("Next:\n")[2].splitlines()
    assert [line.split()[0] for line in said] == ["--output", "--report"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*TARGET, "--mesh", "data"], "is no mesh"),
        ([*TARGET, "--mesh", "data=4,data=4"], "is no mesh"),
        ([*TARGET, "--mesh", "data=3"], "devices"),
        (["plan", "zoo:mlp:tiny", "--topology", "v5x:2x2"], "v5"),
        ([*TARGET, "--budget", "-1"], "budget"),
        ([*TARGET, "--mesh", "data=4", "--output", "/nowhere/plan.json", *SHORT], "/nowhere"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    caught = capsys.readouterr()
    assert says in caught.err and caught.out == ""
    assert "Traceback" not in caught.err


def test_goals(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "zoo:mlp:tiny", "--topology", "v5e:2x2", "--evaluations", "50"]
    assert main([*words, "--objective", "memory", "--memory-limit", "1GiB", "--step-time", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "of 1.00 GiB" in text and "smallest peak memory that was found with a step time of at most 1 s" in text
    assert main([*words, "--objective", "devices"]) == 0
    assert ": v5e:1x1\n" in capsys.readouterr().out
    assert main([*words, "--objective", "devices", "--step-time", "1e-9"]) == 1
    assert "no plan was found that takes at most 1e-09 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--objective", "size"], "objective is one of 'time', 'memory', 'devices', not 'size'"),
        (["--objective", "devices", "--mesh", "data=4"], "objective='devices' chooses the number of devices"),
        (["--step-time", "1"], "step_time_s is the longest step time for objective='memory' or 'devices'"),
        (["--memory-limit", "12GiG"], "memory_limit is a number of bytes, or text such as '12GiB', not '12GiG'"),
    ],
)
def test_wrong_goals(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "zoo:mlp:tiny", "--topology", "v5e:2x2", *words]) == 1
    assert says in capsys.readouterr().err


def test_a_schedule_is_shown_with_its_costs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "zoo:mlp:tiny", "--mesh", "data=2,model=2", "--topology", "v5e:2x2", "--evaluations", "50"]
    assert main([*words, "--tactics", "dp:data,auto:model@params"]) == 0
    text = capsys.readouterr().out
    assert "After each tactic" in text and "\nauto:model@params " in text


def test_what_would_fit_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "zoo:t2b:layers=8,batch=32", "--topology", "v5e:2x2", "--mesh", "data=4"]
    assert main([*words, "--evaluations", "60", "--remat", "no", "--microbatches", "1"]) == 1
    said = capsys.readouterr().err
    would = said.partition("would do (checked):\n")[2].partition("would not do")[0].splitlines()
    changes = next(
        line.strip().partition(":")[0].split(", ") for line in would if line.startswith(("  remat", "  micro"))
    )
    typed = [word.replace("True", "yes") for change in changes for word in f"--{change}".split("=")]
    assert main([*words, *typed, "--evaluations", "100"]) == 0
    assert "Beside the best of" in capsys.readouterr().out


def test_an_error_names_the_option_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "zoo:mlp:tiny", "--topology", "v5e:2x2", "--mesh", "data=4", "--memory-limit", "1KiB"]
    assert main([*words, "--evaluations", "10"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert "--allow-infeasible (allow_infeasible=True) gives this plan all the same" in said
    assert main([*words, "--evaluations", "10", "--allow-infeasible"]) == 0
    assert "note: no plan can fit: at least " in capsys.readouterr().out


def test_what_does_not_fit_is_made_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "zoo:t2b:layers=8,batch=64", "--topology", "v5e:2x4", "--mesh", "data=8"]
    assert main([*words, "--evaluations", "150"]) == 0
    text = capsys.readouterr().out
    assert (
        "Rematerialized: loops and repeated blocks keep their carry" in text
        and "note: unchanged, the program does not fit: at least " in text
    )


def test_the_width_is_that_of_columns_also_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = {}
    for columns in (80, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main([*TARGET, *SHORT, "--all"]) == 0
        longest[columns] = max(map(len, capsys.readouterr().out.splitlines()))
        assert longest[columns] <= columns
    assert longest[80] < longest[160]


def test_colors_are_for_terminals_that_show_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value, wanted in (("NO_COLOR", "1", False), ("FORCE_COLOR", "1", True)):
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        monkeypatch.setenv(name, value)
        assert main([*TARGET, *SHORT]) == 0
        assert ("\x1b[" in capsys.readouterr().out) is wanted
