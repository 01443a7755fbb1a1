"""The reader of compiled programs behind the benchmark of fidelity, and its cache. Nothing is compiled here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fidelity.buffers import names, read_assignment
from benchmarks.fidelity.cases import MESHES, cases
from benchmarks.fidelity.reading import Reader, live, placed
from benchmarks.fidelity.truth import load, summary
from shardwise.verification import hlo

LOOP = """HloModule m

%product (a: bf16[16,64], b: bf16[64,64]) -> bf16[16,64] {
  %a = bf16[16,64]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[16,64]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf, backend_config={"estimated_cycles":"9"}
}

%body (s: (s32[], bf16[16,64], bf16[64,64])) -> (s32[], bf16[16,64], bf16[64,64]) {
  %s = (s32[], bf16[16,64], bf16[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[16,64]{1,0:T(8,128)(2,1)} get-tuple-element(%s), index=1
  %w = bf16[64,64]{1,0:T(8,128)(2,1)} get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = bf16[16,64]{1,0:T(8,128)(2,1)} fusion(%x, %w), kind=kOutput, calls=%product, backend_config={"estimated_cycles":"100"}
  %z = bf16[16,64]{0,1:T(8,128)(2,1)} copy(%y), backend_config={"estimated_cycles":"7"}
  ROOT %t = (s32[], bf16[16,64], bf16[64,64]) tuple(%next, %z, %w)
}

%condition (s: (s32[], bf16[16,64], bf16[64,64])) -> pred[] {
  %s = (s32[], bf16[16,64], bf16[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}

ENTRY %main (x: bf16[16,64], w: bf16[64,64]) -> bf16[16,64] {
  %x = bf16[16,64]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(1)
  %zero = s32[] constant(0)
  %s = (s32[], bf16[16,64], bf16[64,64]) tuple(%zero, %x, %w)
  %loop = (s32[], bf16[16,64], bf16[64,64]) while(%s), condition=%condition, body=%body
  ROOT %y = bf16[16,64]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""


def test_cycles_count_fusions_once_and_loops_as_often_as_they_run() -> None:
    told = Reader(hlo.read(LOOP)).cycles()
    assert told["by_kind"] == {"copy": 35, "matmul": 500}
    assert told["total"] == 535
    first = told["largest"][0]
    assert (first["kind"], first["cycles"], first["runs"], first["count"]) == ("matmul", 100, 5, 1)


def test_cycles_of_decompositions_stand_apart() -> None:
    named = LOOP.replace(
        "calls=%product", 'calls=%product, metadata={op_name="jit(f)/jit(eigh)/while/body/dot_general"}'
    )
    assert Reader(hlo.read(LOOP)).cycles()["untimed"] == 0
    assert Reader(hlo.read(named)).cycles()["untimed"] == 500


def test_arguments_take_whole_tiles() -> None:
    told = Reader(hlo.read(LOOP)).arguments()
    assert told == {"bytes": 2 * (16 * 64 + 64 * 64), "padded_bytes": 2 * (16 * 128 + 64 * 128)}


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        ("f32[8,128]{1,0:T(8,128)}", 4096),
        ("f32[3,1000]{1,0:T(4,128)}", 4 * 1024 * 4),
        ("bf16[4,10,64]{1,2,0:T(8,128)(2,1)}", 4 * 64 * 128 * 2),  # the minor dimension is the middle one
        ("f32[16384]{0:T(1024)}", 65536),
        ("s32[]{:T(128)}", 512),
        ("f32[5,7]{1,0}", 140),
    ],
)
def test_padding_follows_the_layout(shape: str, padded: int) -> None:
    assert [p.padded_bytes for p in placed(shape)] == [padded]


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """A protocol buffer with small numbers of fields, as ``buffers.py`` reads it."""

    def varint(value: int) -> bytes:
        low, rest = value & 127, value >> 7
        return bytes([low | 128]) + varint(rest) if rest else bytes([low])

    parts = []
    for number, value in fields:
        text = isinstance(value, bytes)
        parts.append(varint(number << 3 | 2 * text) + (varint(len(value)) + value if text else varint(value)))
    return b"".join(parts)


def test_what_is_live_at_the_peak(tmp_path: Path) -> None:
    def value(number: int, offset: int, size: int) -> tuple[int, bytes]:
        return 9, message((1, number), (2, offset), (3, size))

    # An argument of 1000 bytes; on the heap 1 and 2 together, then 3 in the place of 1, which is the same buffer.
    argument = message((1, 1), (2, 1000), (5, 1), (7, 1), value(9, 0, 1000))
    heap = message((1, 2), (2, 8192), value(1, 0, 4096), value(2, 4096, 512), value(3, 0, 4096))
    vmem = message((1, 3), (2, 70000), (8, 1), value(4, 0, 70000))
    steps = [(0, 1), (0, 2), (2, 3), (1, 1), (1, 2), (1, 3)]
    trace = message(*((1, message((1, kind), (2, number))) for kind, number in steps))
    whole = message((3, message((3, argument), (3, heap), (3, vmem), (4, trace))))
    (tmp_path / "m.hlo.pb").write_bytes(whole)
    assignment = read_assignment(tmp_path / "m.hlo.pb")
    assert assignment.figures() == {
        "peak": 1000 + 4096 + 512,
        "allocated": 1000 + 8192,
        "argument": 1000,
        "output": 1000,
        "alias": 1000,
        "heap": 8192,
    }
    text = " value: <3 y @0> (size=4096,offset=0): bf16[16,64]{1,0:T(8,128)(2,1)}\n"
    told = live(assignment, names(text, assignment), hlo.read(LOOP))
    assert (told["count"], told["padded_bytes"]) == (2, 4608)
    assert told["largest"][0] == ["y", 4096, 2048, "bf16[16,64]{1,0:T(8,128)(2,1)}", ""]


def test_the_latest_line_counts_and_later_ones_may_confirm_it(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"
    lines = [
        {"case": "a", "plan": "1", "error": "crash", "source": "x"},
        {"case": "a", "plan": "2", "no_case": "nothing to shard", "source": "x"},
        {"case": "a", "again": {"plan": "3", "source": "y"}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = load(path)
    assert known == {"a": {"case": "a", "plan": "3", "no_case": "nothing to shard", "source": "y"}}
    assert summary(known.values()).endswith("no_case: 1")


def test_cases_are_many_and_distinct_and_v5e_comes_first() -> None:
    every = cases()
    assert len({c.key for c in every}) == len({c.file for c in every}) == len(every) > 300
    assert len({c.program for c in every}) >= 12
    breadth = every[: 2 * len({c.program for c in every})]
    assert {c.program for c in breadth} == {c.program for c in every}
    assert {c.topology for c in breadth} == {next(iter(MESHES))}
