"""Loads and checks hardware profiles: TOML files, built in or the user's.

A profile is looked up by name or alias in the folders (or files) of ``SHARDWISE_HARDWARE_PATH`` and then among the built-in
ones; a path to a ``.toml`` file works wherever a name does. ``base = "h100"`` starts from another profile and replaces the
figures that the file has; an inherited figure keeps its source. All problems of a file are collected and raised once.
"""

from __future__ import annotations

import copy
import difflib
import functools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from shardwise.errors import HardwareError
from shardwise.hardware.profile import (
    COLLECTIVES,
    FIGURES,
    MATRIX_TYPES,
    WRAP_RULE,
    WRAP_RULES,
    Figure,
    LinkTier,
    Profile,
    figures,
)

ENVIRONMENT: Final = "SHARDWISE_HARDWARE_PATH"
BUILT_IN: Final = Path(__file__).parent / "profiles"
#: Tables with one figure per kind of collective.
BY_KIND: Final = ("hidden", "efficiency")
_TABLES: Final = ("memory", "matrix", "vector", "latency", *BY_KIND)
#: The profile for devices that no profile describes, by platform.
_BY_PLATFORM: Final = {"cpu": "cpu", "gpu": "a100-40", "tpu": "v5e"}
_LINK_FIGURES: Final = tuple(figures(LinkTier).values())
_LINK_KEYS: Final = ("largest", *(f.key for f in _LINK_FIGURES))


def load_profile(name: str) -> Profile:
    """Returns the profile of a name, an alias, or a path to a ``.toml`` file.

    >>> load_profile("v5e").title
    'TPU v5e'
    """
    return build_profile(*_read(name, ()))


def profile_data(name: str) -> dict[str, Any]:
    """Returns a profile as data in the layout of its file, with the figures of its base."""
    return _read(name, ())[0]


def profiles() -> tuple[tuple[Profile, ...], tuple[str, ...]]:
    """Returns all profiles, by name, and the problems of files that cannot be used."""
    by_name: dict[str, Profile] = {}
    problems: list[str] = []
    for path in _files():
        try:
            profile = load_profile(str(path))
        except HardwareError as error:
            problems.append(str(error))
            continue
        by_name.setdefault(profile.name, profile)
    return tuple(by_name[name] for name in sorted(by_name)), tuple(problems)


def canonical(name: str) -> str:
    """
    >>> canonical("TPU v5_lite")
    'tpu-v5-lite'
    """
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def is_known_name(name: str) -> bool:
    return is_path(name) or canonical(name) in _names()


def nearest_profile(device_kind: str, platform: str) -> tuple[str, bool]:
    """Returns the name of the profile for a device, and whether it describes this kind of device.

    >>> nearest_profile("NVIDIA H100 80GB HBM3", "gpu"), nearest_profile("NVIDIA L4", "gpu")
    (('h100', True), ('a100-40', False))
    """
    words = canonical(device_kind).replace("-sxm4", "").split("-")
    if platform != "cpu" and "mig" not in words:
        for count in range(len(words), 1, -1):
            if is_known_name(name := "-".join(words[:count])):
                return load_profile(name).name, True
    return _BY_PLATFORM.get(platform, "cpu"), False


def is_path(name: str) -> bool:
    return name.endswith(".toml")


def _files() -> Iterator[Path]:
    """Yields the files of profiles, the user's first."""
    for entry in os.environ.get(ENVIRONMENT, "").split(os.pathsep):
        if not entry:
            continue
        path = Path(entry).expanduser()
        if not path.exists():
            raise HardwareError(f"{ENVIRONMENT} names {entry}, which does not exist")
        yield from sorted(path.glob("*.toml")) if path.is_dir() else [path]
    yield from sorted(BUILT_IN.glob("*.toml"))


def _names() -> dict[str, Path]:
    """Returns files by name and alias; names take precedence over aliases, and the user's over built-in ones."""
    names: dict[str, Path] = {}
    aliases: dict[str, Path] = {}
    for path in _files():
        try:
            data = _parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            data = {}  # It is reported when it is loaded.
        name = data.get("name")
        names.setdefault(canonical(name if isinstance(name, str) else path.stem), path)
        others = data.get("aliases")
        for alias in others if isinstance(others, list) else []:
            aliases.setdefault(canonical(str(alias)), path)
    return aliases | names


#: Every lookup of a name reads all files.
_parse: Final = functools.lru_cache(maxsize=64)(tomllib.loads)


def _find(name: str) -> Path:
    if is_path(name):
        path = Path(name).expanduser()
        if not path.is_file():
            raise HardwareError(f"there is no hardware profile {name}")
        return path
    names = _names()
    wanted = canonical(name)
    if wanted not in names:
        count = re.fullmatch(r"(.+?)[-_ ]?[x*](\d+)", name)
        if count and canonical(count[1]) in names:
            raise HardwareError(f"unknown hardware {name!r}; did you mean {count[1]}:{count[2]}?")
        near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "'shardwise hardware list' shows what there is."
        raise HardwareError(
            f"unknown hardware {name!r}; {hint} For another device write a .toml file: use its path, or set {ENVIRONMENT}"
        )
    return names[wanted]


def _read(name: str, asked_by: tuple[Path, ...]) -> tuple[dict[str, Any], Path]:
    """Returns the data of a file, merged with that of its base, and its path."""
    path = _find(name)
    if path in asked_by:
        raise HardwareError(f"{path}: its base leads back to itself")
    try:
        data = copy.deepcopy(_parse(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise HardwareError(f"{path} cannot be read: {error}") from None
    data.setdefault("name", path.stem)
    base = data.get("base")
    if not isinstance(base, str):
        return data, path
    # A path is relative to the file that names it.
    base_data, _ = _read(str(path.parent / base) if is_path(base) else base, (*asked_by, path))
    return _merged(data, base_data), path


def _merged(data: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    merged = base | {"aliases": []} | data
    for table in _TABLES:
        if isinstance(base.get(table), dict) and isinstance(data.get(table), dict):
            merged[table] = base[table] | data[table]
    old, new = base.get("sources", {}), data.get("sources", {})
    if isinstance(old, dict) and isinstance(new, dict):
        inherited = dict(figures_of(merged)).keys() - dict(figures_of(data)).keys()
        merged["sources"] = {k: v for k, v in old.items() if k in inherited} | new
    return merged


def figures_of(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields figures with their dotted keys: ``memory.bytes``, ``links.ICI.bytes_per_s``."""
    for key, value in data.items():
        if key == "sources":
            continue
        if key == "links" and isinstance(value, list):
            for k, link in enumerate(value):
                if isinstance(link, dict):
                    yield from ((f"links.{link.get('name', k)}.{leaf}", v) for leaf, v in link.items())
        elif isinstance(value, dict):
            yield from ((f"{key}.{leaf}", v) for leaf, v in value.items())
        else:
            yield key, value


def build_profile(data: dict[str, Any], path: Path) -> Profile:
    """Returns the profile of complete data, or raises all its problems at once."""
    values = dict(figures_of(data))
    keys = {"aliases", "links", *(f.key for f in FIGURES)}
    problems = [_unknown(key, keys) for key in values if key not in keys and not key.startswith("links.")]
    problems += filter(None, (figure.problem(values) for figure in FIGURES))
    aliases = values.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        problems.append(f"aliases is {aliases!r}, not a list of names")
    problems += _link_problems(data.get("links"))
    sources = data.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(source, str) for source in sources.values()):
        problems.append("sources is not a table of figure = source, each a text")
    else:
        problems += ["sources: " + _unknown(key, values) for key in sources if key not in values]
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise HardwareError(f"the hardware profile {path} cannot be used:{lines}")
    # By default a kernel over an array costs one operation per element.
    values.setdefault("vector.elements_per_s", values["vector.flops_per_s"])

    def table(name: str, keys: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
        return tuple((key, float(values[f"{name}.{key}"])) for key in keys if f"{name}.{key}" in values)

    def fields(of: type, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: f.kind(values[f.key]) for name, f in figures(of).items() if f.key in values}

    by_kind: dict[str, Any] = {name: table(name, COLLECTIVES) for name in BY_KIND}
    return Profile(
        aliases=tuple(aliases),
        file=str(path),
        links=tuple(LinkTier(largest=tuple(t.get("largest", ())), **fields(LinkTier, t)) for t in data["links"]),
        sources=tuple(sources.items()),
        matrix_flops_per_s=table("matrix", MATRIX_TYPES),
        **by_kind,
        **fields(Profile, values),
    )


def _link_problems(links: Any) -> list[str]:
    if not isinstance(links, list) or not links or not all(isinstance(link, dict) for link in links):
        return ["links is missing: write one [[links]] table for each tier, innermost first"]
    problems = []
    names = [link.get("name") for link in links]
    for k, link in enumerate(links):
        where = f"links.{link.get('name', k)}."
        problems += [where + _unknown(key, _LINK_KEYS) for key in link if key not in _LINK_KEYS]
        if names.count(link.get("name")) > 1:
            problems.append(f"{where}name is used twice")
        problems += [where + problem for figure in _LINK_FIGURES if (problem := figure.problem(link))]
        problems += [where + problem for problem in _shape_problems(link)]
    if all(link.get("size") for link in links):
        problems.append("links has only tiers of fixed size: the last one must be able to grow")
    return problems


def _shape_problems(link: dict[str, Any]) -> list[str]:
    torus = link.get("kind") == "torus"
    if link.get("kind") not in ("torus", "switch"):
        return [f'kind is {link.get("kind")!r}; it is "torus" or "switch"']
    only = ("size",) if torus else ("dims", "wrap")
    problems = [f"{key} is for a {'switch' if torus else 'torus'} only" for key in only if key in link]
    problems += [f"{key} is missing" for key in ("dims", "wrap") if torus and key not in link]
    if torus and not WRAP_RULE.fullmatch(str(link.get("wrap", "never"))):
        problems.append(f"wrap is {link['wrap']!r}: no such rule; write one of {', '.join(WRAP_RULES)}")
    if link.get("wrap") == "whole" and "largest" not in link:
        problems.append('largest is missing: wrap = "whole" is about it')
    largest = Figure("largest", kind=tuple, count=link.get("dims", 1) if torus else 1, required=False)
    return problems + [problem for problem in (largest.problem(link),) if problem]


def _unknown(key: str, keys: Any) -> str:
    near = difflib.get_close_matches(key, list(keys), n=1)
    return f"{key} is not known" + (f"; did you mean {near[0]}?" if near else "")
