"""``shardwise hardware``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.hardware.load import ENVIRONMENT, load_profile, profiles


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(("hardware", *arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_fits_eighty_columns_and_has_every_profile(capsys) -> None:
    code, out, err = run("list", capsys=capsys)
    lines = out.splitlines()
    assert code == 0 and not err
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == ["name", *(p.name for p in profiles()[0])]
    rows = [" ".join(line.split()) for line in lines]
    assert "v5e 16 GiB 197 T bf16 810 GB/s ICI 2-D 45, DCN 3.12" in rows
    assert "h100 80 GiB 990 T bf16 3.35 TB/s NVLink×8 450, InfiniBand 50" in rows
    assert "v3 16 GiB 61.5 T bf16 450 GB/s chip×2 100, ICI 2-D 100, DCN 3.12" in rows


def test_list_as_json(capsys) -> None:
    _, out, _ = run("list", "--json", capsys=capsys)
    data = json.loads(out)
    assert data["schema"] == 1 and not data["problems"]
    v5e = next(p for p in data["profiles"] if p["name"] == "v5e")
    assert v5e["matrix"]["bf16"] == 1.97e14
    assert v5e["links"][0] == {
        "name": "ICI",
        "kind": "torus",
        "dims": 2,
        "wrap": "at least 16",
        "largest": [16, 16],
        "bytes_per_s": 4.5e10,
        "latency_s": 1e-6,
    }


def test_show_has_every_figure_with_its_source(capsys) -> None:
    code, out, _ = run("show", "v5e", capsys=capsys)
    assert code == 0 and out.startswith("TPU v5e (v5e)\nalso called tpu-v5e")
    figures, sources = out.split("\nSources\n")
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("read from"))
    sources = " ".join(sources.split())
    for key, source in load_profile("v5e").sources:
        if key != "type_count":
            assert f"\n{key} " in figures and source in sources, key
    assert "not stated" not in out


def test_show_a_topology(capsys) -> None:
    _, out, _ = run("show", "2*v5e:8x16", capsys=capsys)
    assert "topology 2*v5e:8x16 (256 devices: x 8, y 16 ring, dcn 2)" in out
    assert "  y              16  ICI, ring, 45 GB/s one way a device" in out
    _, out, _ = run("show", "v5litepod-16", capsys=capsys)
    assert "topology v5e:4x4 (16 devices: x 4, y 4)" in out
    _, out, _ = run("show", "v3:2x4", "--json", capsys=capsys)
    data = json.loads(out)
    assert data["name"] == "v3" and data["topology"]["text"] == "v3:2x4"
    assert [a["name"] for a in data["topology"]["axes"]] == ["chip", "x", "y"]


def test_wrong_names_and_files(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("show", "h10", capsys=capsys)
    assert code == 1 and not out and "did you mean h100" in err
    (tmp_path / "bad.toml").write_text('title = "Bad"\nbase = "h100"\nclock_hz = -1\n')
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    code, out, _ = run("list", capsys=capsys)
    assert code == 0 and "bad.toml cannot be used" in out and "\nh100 " in out
    code, _, err = run("show", "bad", capsys=capsys)
    assert code == 1 and "clock_hz is -1, which cannot be" in err


def test_wrong_commands_exit_with_two(capsys) -> None:
    for arguments in (["hardware"], ["hardware", "show"], ["hardware", "sing"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
