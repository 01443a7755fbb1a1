"""``docs/benchmarks/corpus.md`` from ``corpus/results.jsonl``."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from corpus.registry import SPLITS, Program, programs

RESULTS: Final = Path(__file__).with_name("results.jsonl")
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks" / "corpus.md"
Records = dict[str, dict[str, Any]]

_HEAD: Final = """# The corpus: programs of other packages

Written by `make corpus` and `make corpus-full`. {count} programs of {packages} packages on PyPI, each a small adapter in \
`corpus/` around code of the package. One environment has all of them; versions are pinned in `corpus/requirements.txt`.

- *Small* programs are planned twice for eight devices: for the shortest step on host devices, and for the smallest memory, \
which shards as much as possible. Both plans are run on eight host devices, and every output is compared with plain `jax.jit` \
as `shardwise.verify` does it.
- *Full* programs have the width of models that people train. They are planned from shapes for v5e:4x4 and compiled by XLA's \
TPU compiler without a TPU.

Half of the programs are the **test set**: nothing in Shardwise is fitted or tuned on them. The other half may be used for \
that. The split was made once: of the programs sorted by kind (training, inference), package and name, every other one is in \
the test set. It is written in each adapter and does not change when programs are added: those are in the fit set. There are \
{splits}.

All times are CPU seconds of the process, with nothing traced or compiled before."""

#: The wanted plan time: twice the tracing time plus three seconds.
FACTOR: Final = 2.0
EXTRA_S: Final = 3.0


def load() -> Records:
    if not RESULTS.exists():
        return {}
    return {(row := json.loads(line)).pop("name"): row for line in RESULTS.read_text().splitlines()}


def save(records: Records) -> None:
    RESULTS.write_text("".join(json.dumps({"name": n} | records[n], sort_keys=True) + "\n" for n in sorted(records)))


def failure(record: dict[str, Any]) -> str | None:
    """Returns in one line why a program failed in one mode, ``None`` if it worked."""
    if "error" in record:
        return str(record["error"])
    for name in ("time", "memory"):
        if name in record and not record[name]["agrees"]:
            return f"the plan for {name} computes other numbers: {'; '.join(record[name]['unexplained'])}"
    if record.get("refused") and record["fits"]:
        return f"said to fit ({_gb(record['predicted_peak'])} GB), refused by the compiler: {record['refused']}"
    return None


def too_slow(record: dict[str, Any]) -> bool:
    return bool(record["time"]["plan_s"] > FACTOR * record["trace_s"] + EXTRA_S)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", r"\<")


def _failures(every: Sequence[Program], records: Records) -> list[str]:
    rows = [
        f"| {p.name} | {p.package} | {mode} | {_cell(why)} |"
        for p in every
        for mode in ("small", "full")
        if (record := records.get(p.name, {}).get(mode)) and (why := failure(record))
    ]
    missing = {m: [p.name for p in every if m not in records.get(p.name, {})] for m in ("small", "full")}
    lines = ["## Failures", ""]
    lines += ["| program | package | sizes | reason |", "|---|---|---|---|", *rows, ""] if rows else ["None.", ""]
    for mode, said in {"small": "Not run", "full": "Not compiled at full size"}.items():
        if missing[mode]:
            lines += [f"{said}: {', '.join(missing[mode])}.", ""]
    return lines


def _small(every: Sequence[Program], records: Records) -> list[str]:
    done = [(p, r) for p in every if (r := records.get(p.name, {}).get("small"))]
    ran = [(p, r) for p, r in done if "error" not in r]
    if not ran:
        return []
    slow = [p.name for p, r in ran if too_slow(r)]
    calls = [r["planned_first_call_s"] / max(r["plain_first_call_s"], 0.1) for _, r in ran]
    lines = [
        "## Small: planned, run and compared",
        "",
        f"{sum(failure(r) is None for _, r in done)} of {len(done)} programs work: planned, and every output equal to that of "
        f"plain JAX. Planning for the shortest step takes at most twice the tracing time plus 3 s for "
        f"{len(ran) - len(slow)} of {len(ran)}{' (not for ' + ', '.join(slow) + ')' if slow else ''}. The first call of the "
        f"planned function takes "
        f"{statistics.median(calls):.1f} times as long as that of plain `jit` in the median, {max(calls):.1f} times at most.",
        "",
        "*Difference* is the largest of any output, relative to the output's largest value; where it is large, plain runs with "
        "inputs perturbed by rounding differ as much (*sensitivity*): the sign of a tiny gradient decides a step of Adam or "
        "Lion. *Sharded* counts arguments and outputs under the plan for the shortest step, and for the smallest memory.",
        "",
        "| program | package | kind | set | what | ops | tracing s | plan s | first call s (plain) | sharded | "
        "difference | sensitivity |",
        "|---|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for p, r in ran:
        time, memory = r["time"], r["memory"]
        difference = max(time["difference"], memory["difference"])
        sensitivity = max(time["sensitivity"], memory["sensitivity"])
        lines.append(
            f"| {p.name} | {p.package} | {p.kind} | {p.split} | {_cell(p.what)} | {r['ops']:,} | {r['trace_s']:.2f} "
            f"| {time['plan_s']:.2f} | {r['planned_first_call_s']:.2f} ({r['plain_first_call_s']:.2f}) "
            f"| {time['sharded']}, {memory['sharded']} of {time['arrays']} | {difference:.1e} | {sensitivity:.1e} |"
        )
    return [*lines, ""]


def _full(every: Sequence[Program], records: Records) -> list[str]:
    ran = [(p, r) for p in every if (r := records.get(p.name, {}).get("full")) and "error" not in r]
    if not ran:
        return []
    fitting = [(p, r) for p, r in ran if not r["refused"]]
    lines = ["## Full: predicted against compiled", ""]
    for split in SPLITS:
        own = [r for p, r in fitting if p.split == split]
        if own:
            peaks = [r["predicted_peak"] / r["compiled_peak"] for r in own]
            times = [r["predicted_compute_s"] / r["compiled_compute_s"] for r in own if r["compiled_compute_s"]]
            lines.append(
                f"- {split} set: {len(own)} programs. Peak memory, predicted over compiled: median "
                f"{statistics.median(peaks):.2f}, {min(peaks):.2f} to {max(peaks):.2f}. Compute time: median "
                f"{statistics.median(times):.2f}, {min(times):.2f} to {max(times):.2f}. Bytes as predicted: median "
                f"{statistics.median(r['matched'] for r in own):.1%}."
            )
    lines += [
        "",
        "Compute time is compared with the compiler's estimate of cycles, in which collectives are not included. *Bytes* are "
        "those that one device moves in collectives in one step.",
        "",
        "| program | set | arguments GB | mesh | step ms | compute ms (compiled) | MB moved (compiled) | bytes as predicted | "
        "peak GB (compiled) | tracing s | plan s |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for p, r in ran:
        peak = "refused" if r["refused"] else _gb(r["compiled_peak"])
        lines.append(
            f"| {p.name} | {p.split} | {_gb(r['argument_bytes'])} | {r['mesh']} | {r['predicted_s'] * 1e3:.2f} "
            f"| {r['predicted_compute_s'] * 1e3:.2f} ({r['compiled_compute_s'] * 1e3:.2f}) "
            f"| {r['predicted_bytes'] / 1e6:.1f} ({r['compiled_bytes'] / 1e6:.1f}) | {r['matched']:.0%} "
            f"| {_gb(r['predicted_peak'])} ({peak}) | {r['trace_s']:.2f} | {r['plan_s']:.2f} |"
        )
    return [*lines, ""]


def page() -> str:
    every, records = programs(), load()
    counts = Counter((p.split, p.kind) for p in every)
    splits = "; ".join(
        f"{counts[s, 'train']} training and {counts[s, 'infer']} inference programs in the {s} set" for s in SPLITS
    )
    head = _HEAD.format(count=len(every), packages=len({p.package for p in every}), splits=splits)
    lines = [head, "", *_failures(every, records), *_small(every, records), *_full(every, records)]
    return "\n".join(lines).rstrip() + "\n"
