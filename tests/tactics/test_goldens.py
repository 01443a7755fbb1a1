"""Named strategies give what a practitioner would write, on every transformer of the zoo and on those of other packages."""

from __future__ import annotations

import pytest

from tests.tactics import goldens


@pytest.mark.parametrize("name", goldens.PROGRAMS)
def test_strategies_shard_as_reviewed(name: str) -> None:
    """``python -m tests.tactics.goldens`` writes the goldens anew; review the difference."""
    assert goldens.text(name) == (goldens.FOLDER / f"{name}.txt").read_text()


def test_goldens_belong_to_programs() -> None:
    assert {path.stem for path in goldens.FOLDER.iterdir()} == {*goldens.PROGRAMS}
