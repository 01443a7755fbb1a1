"""Files that are complete or not there: what is written is written beside and renamed."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path

from shardwise.errors import ShardwiseError


def write_whole(path: str | os.PathLike[str], text: str, failure: type[ShardwiseError] = ShardwiseError) -> None:
    """Writes a text, or raises ``failure``: then what was there before still is.

    A link is followed; a device or a pipe (``/dev/stdout``) is written to as it is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(f"{folder}/plan.json", "{}")
    ...     print(Path(folder, "plan.json").read_text())
    {}
    """
    try:
        if _is_special(Path(path)):
            Path(path).write_text(text, encoding="utf-8")
        else:
            _write_beside(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise failure(f"cannot write {Path(path)}: {error.strerror}") from None


def check_writable(path: str | os.PathLike[str], failure: type[ShardwiseError] = ShardwiseError) -> None:
    """Raises what :func:`write_whole` would, before time is spent on what is to be written."""
    shown, target = Path(path), Path(os.path.realpath(path))
    if shown.is_dir() or not target.parent.is_dir():
        what = "it is a folder" if shown.is_dir() else f"there is no folder {shown.parent}"
        raise failure(f"cannot write {shown}: {what}")
    if _is_special(shown):  # Opening a pipe and closing it again would end its reader.
        return
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise failure(f"cannot write {shown}: {error.strerror}") from None


def _is_special(path: Path) -> bool:
    """Is it something that a file must not take the place of?"""
    return path.exists() and not path.is_file() and not path.is_dir()


def _write_beside(target: Path, text: str) -> None:
    beside = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
