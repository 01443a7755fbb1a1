"""Files are complete or not there, and nothing that is no file is replaced by one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shardwise.errors import PlanError, ShardwiseError
from shardwise.files import check_writable, write_whole


def test_a_file_is_written_with_the_mode_of_any_other(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    before = os.umask(0o027)
    try:
        write_whole(file, "é\n")
    finally:
        os.umask(before)
    assert file.read_text(encoding="utf-8") == "é\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("trouble", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_there_stays_where_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: BaseException
) -> None:
    file = tmp_path / "plan.json"
    file.write_text("before")

    def fails(*_: object) -> None:
        raise trouble

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises((PlanError, KeyboardInterrupt), match=r"cannot write .*plan\.json: No space left|^$"):
        write_whole(file, "after", PlanError)
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "plan.json", tmp_path / "latest.json"
    link.symlink_to(file)
    check_writable(link)
    write_whole(link, "text")
    assert link.is_symlink() and file.read_text() == "text"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        write_whole(pipe, "text")
        assert os.read(reader, 100) == b"text" and pipe.is_fifo()
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("name", "why"),
    [("missing/x", "there is no folder"), ("", "it is a folder"), ("/proc/nothing/x", "there is no folder")],
)
def test_it_is_known_before_whether_a_file_can_be_written(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(PlanError, match=f"cannot write .*: {why}"):
        check_writable(tmp_path / name, PlanError)
    with pytest.raises(PlanError, match="cannot write "):
        write_whole(tmp_path / name, "text", PlanError)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_nothing_can_be_made_in() -> None:
    with pytest.raises(ShardwiseError, match=r"cannot write /proc/plan\.json: "):
        check_writable("/proc/plan.json")
