"""Profiles: the built-in ones are complete and cited, the user's are found, and what is wrong with one is said at once."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from shardwise.errors import HardwareError
from shardwise.hardware.load import BUILT_IN, ENVIRONMENT, figures_of, load_profile, profile_data, profiles
from shardwise.hardware.profile import Profile

NAMES = ["a100-40", "a100-80", "b200", "cpu", "h100", "h200", "p100", "v100", "v2", "v3", "v4", "v5e", "v5p", "v6e"]

MINE = """
title = "Mine"
clock_hz = 1e9
[memory]
bytes = 17179869184
usable_share = 0.9
bytes_per_s = 1e12
efficiency = 0.9
[matrix]
f32 = 1e13
efficiency = 0.9
tile = [8, 128, 128]
[vector]
flops_per_s = 1e12
tile = [8, 128]
[latency]
launch_s = 1e-6
collective_s = 1e-6
[[links]]
name = "wire"
kind = "torus"
dims = 2
wrap = "always"
bytes_per_s = 1e10
latency_s = 1e-6
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def test_all_profiles_load() -> None:
    found, problems = profiles()
    assert [p.name for p in found] == NAMES
    assert not problems


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    profile = load_profile(name)
    texts = ("name", "title", "base", "aliases", "kind", "dims", "type_count")
    figures = [key for key, _ in figures_of(profile_data(name)) if key.rpartition(".")[2] not in texts]
    uncited = sorted(f for f in figures if profile.source(f) == "not stated")
    assert not uncited
    for figure in figures:
        source = profile.source(figure)
        assert any(
            word in source for word in ("http", "estimate", "measured", "seen", "jax", "DGX", "FLOP/s", "benchmarks")
        ), (
            figure,
            source,
        )


@pytest.mark.parametrize(
    ("name", "bf16", "memory_gib", "bandwidth", "link"),
    [
        ("v3", 6.15e13, 16, 4.5e11, 1e11),
        ("v4", 2.75e14, 32, 1.2e12, 4.5e10),
        ("v5e", 1.97e14, 16, 8.1e11, 4.5e10),
        ("v5p", 4.59e14, 96, 2.8e12, 9e10),
        ("v6e", 9.2e14, 32, 1.6e12, 9e10),
        ("a100-40", 3.12e14, 40, 1.56e12, 3e11),
        ("a100-80", 3.12e14, 80, 2.04e12, 3e11),
        ("h100", 9.9e14, 80, 3.35e12, 4.5e11),
        ("h200", 9.9e14, 139, 4.8e12, 4.5e11),
    ],
)
def test_public_figures(name: str, bf16: float, memory_gib: int, bandwidth: float, link: float) -> None:
    """v3 counts one of the two cores of a chip."""
    profile = load_profile(name)
    assert profile.matrix_rate("bf16") == bf16
    assert profile.memory_bytes == memory_gib * 2**30
    assert profile.memory_bytes_per_s == bandwidth
    tier = next(t for t in profile.links if not t.size)
    assert tier.bytes_per_s == link


def test_a_missing_type_has_the_rate_of_the_next_wider_one() -> None:
    v5e, v100 = load_profile("v5e"), load_profile("v100")
    assert v5e.matrix_rate("float8_e4m3fn") == v5e.matrix_rate("bfloat16") == 1.97e14
    assert v5e.matrix_rate("int4") == v5e.matrix_rate("int8") == 3.94e14
    assert v5e.matrix_rate("complex64") == v5e.matrix_rate("float32")
    assert v100.matrix_rate("bf16") == v100.matrix_rate("f32") == 1.57e13
    assert v100.matrix_rate("float16") == 1.25e14


def test_what_hides() -> None:
    assert load_profile("v5e").hidden_share("all-gather") > 0.5
    assert load_profile("v3").hidden_share("all-gather") == 0
    assert load_profile("v5e").hidden_share("all-reduce") == 0


@pytest.mark.parametrize(
    ("alias", "name"),
    [("TPU v5 lite", "v5e"), ("v5litepod", "v5e"), ("a100", "a100-40"), ("A100_80GB", "a100-80"), ("trillium", "v6e")],
)
def test_aliases(alias: str, name: str) -> None:
    assert load_profile(alias).name == name


def test_unknown_names_get_near_ones() -> None:
    with pytest.raises(HardwareError, match=r"unknown hardware 'v5x'; did you mean v5p or v5e"):
        load_profile("v5x")
    with pytest.raises(HardwareError, match="'shardwise hardware list' shows"):
        load_profile("quantum")
    with pytest.raises(HardwareError, match=r"there is no hardware profile nowhere\.toml"):
        load_profile("nowhere.toml")


def test_a_path_in_place_of_a_name(tmp_path: Path) -> None:
    profile = load_profile(str(write(tmp_path, "mine", MINE)))
    assert isinstance(profile, Profile)
    assert profile.name == "mine" and profile.matrix_rate("bf16") == 1e13
    assert profile.source("clock_hz") == "not stated"


def test_the_users_folder_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "mine", MINE)
    write(tmp_path, "v5e", 'base = "v5p"\ntitle = "Not a v5e"\n')
    other = tmp_path / "one"
    other.mkdir()
    single = write(other, "single", MINE)
    monkeypatch.setenv(ENVIRONMENT, os.pathsep.join([str(tmp_path), str(single)]))
    assert load_profile("mine").title == "Mine" and load_profile("single").name == "single"
    assert load_profile("v5e").title == "Not a v5e"
    assert load_profile("v5litepod").title == "TPU v5e"
    assert {"mine", "single"} < {p.name for p in profiles()[0]}
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "absent"))
    with pytest.raises(HardwareError, match=r"absent, which does not exist"):
        load_profile("v5e")


def test_a_broken_file_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "bad", "title = ")
    write(tmp_path, "mine", MINE)
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    assert load_profile("mine").title == "Mine"
    found, problems = profiles()
    assert len(found) == len(NAMES) + 1 and len(problems) == 1 and "bad.toml cannot be read" in problems[0]
    with pytest.raises(HardwareError, match="cannot be read"):
        load_profile("bad")


def test_base_takes_over_figures_and_their_sources(tmp_path: Path) -> None:
    text = 'title = "Faster"\nbase = "h100"\n[memory]\nbytes_per_s = 9e12\n'
    faster, h100 = load_profile(str(write(tmp_path, "faster", text))), load_profile("h100")
    assert faster.memory_bytes_per_s == 9e12 and faster.memory_bytes == h100.memory_bytes
    assert faster.source("memory.bytes_per_s") == "not stated"
    assert faster.source("memory.bytes") == h100.source("memory.bytes")
    assert not faster.aliases
    links = '[[links]]\nname = "wire"\nkind = "switch"\nbytes_per_s = 1e9\nlatency_s = 1e-6\n'
    rewired = load_profile(str(write(tmp_path, "rewired", 'title = "R"\nbase = "faster.toml"\n' + links)))
    assert [t.name for t in rewired.links] == ["wire"] and rewired.memory_bytes_per_s == 9e12
    write(tmp_path, "loop", 'title = "L"\nbase = "loop.toml"\n')
    with pytest.raises(HardwareError, match="leads back to itself"):
        load_profile(str(tmp_path / "loop.toml"))


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    text = (
        MINE.replace("bytes = 17179869184", "bytes = 16")
        .replace("usable_share = 0.9", "usable_share = 1.5")
        .replace("clock_hz = 1e9", "clock = 1e9")
        .replace("f32 = 1e13", 'f32 = "fast"\nbf61 = 1e13')
        .replace("launch_s = 1e-6", "launch_s = -1e-6")
        .replace("tile = [8, 128, 128]", "tile = [8, 128]")
        .replace('wrap = "always"', 'wrap = "sometimes"')
        .replace("dims = 2", "dims = 2\nlargest = [4]")
        + '[sources]\n"memory.byte" = "a book"\n'
    )
    with pytest.raises(HardwareError) as caught:
        load_profile(str(write(tmp_path, "mine", text)))
    message = str(caught.value)
    for part in (
        "clock_hz is missing",
        "clock is not known; did you mean clock_hz?",
        "memory.bytes is 16, which cannot be: in bytes, not GB",
        "memory.usable_share is 1.5, which cannot be",
        "matrix.f32 is 'fast', not a number",
        "matrix.bf61 is not known; did you mean matrix.bf16?",
        "latency.launch_s is -1e-06, which cannot be",
        "matrix.tile is [8, 128], not 3 whole numbers",
        "links.wire.wrap is 'sometimes': no such rule",
        "links.wire.largest is [4], not 2 whole numbers",
        "sources: memory.byte is not known; did you mean memory.bytes?",
    ):
        assert part in message, part
    assert message.count("\n  - ") == 11


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("bytes_per_s = 1e10", "bytes_per_s = nan", "links.wire.bytes_per_s is nan, not a number"),
        ("bytes_per_s = 1e10", "bytes_per_s = 0", "links.wire.bytes_per_s is 0, which cannot be"),
        ("bytes_per_s = 1e10", "bytes_per_s = true", "links.wire.bytes_per_s is True, not a number"),
        ("dims = 2", "dims = 1.5", "links.wire.dims is 1.5, not a whole number"),
        ("dims = 2\n", "", "links.wire.dims is missing"),
        ('kind = "torus"', 'kind = "ring"', 'kind is \'ring\'; it is "torus" or "switch"'),
        ('kind = "torus"', 'kind = "switch"', "links.wire.wrap is for a torus only"),
        ('wrap = "always"', 'wrap = "whole"', "links.wire.largest is missing"),
        ('name = "wire"', "", "links.0.name is missing"),
        ('title = "Mine"', "", "title is missing"),
        ('title = "Mine"', "title = 3", "title is 3, not a text"),
        ('title = "Mine"', 'title = "Mine"\naliases = "a"', "aliases is 'a', not a list of names"),
        ("clock_hz = 1e9", "clock_hz = 1.5", "clock_hz is 1.5, which cannot be: in Hz, not GHz"),
        ("[memory]", "[memoir]", "memory.bytes is missing"),
        ("[memory]", "base = 3\n[memory]", "base is 3, not a text"),
        (
            "[memory]",
            "[memory]\nturned_bytes_per_s = 1e9",
            "memory.turned_bytes_per_s is not known; did you mean memory",
        ),
    ],
)
def test_one_problem(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in MINE
    with pytest.raises(HardwareError) as caught:
        load_profile(str(write(tmp_path, "mine", MINE.replace(old, new))))
    assert problem in str(caught.value)


def test_a_profile_without_links(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="links is missing"):
        load_profile(str(write(tmp_path, "mine", MINE.split("[[links]]")[0])))


def test_files_are_named_after_their_profiles() -> None:
    for path in BUILT_IN.glob("*.toml"):
        assert tomllib.loads(path.read_text())["name"] == path.stem
