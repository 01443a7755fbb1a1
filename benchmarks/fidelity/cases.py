"""Which cases there are: programs of the zoo at full width, strategies by name, TPU topologies with the meshes that fit them.

Depth is cut so that a compile takes well under a minute; width, which decides tiles and collectives, is not. Batches are such
that most strategies fit 16 GB and some do not: a model of memory must get both right. Cases come in an order of breadth:
every program before every strategy, v5e before v3 and v5p.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardwise.tactics.tactic import Tactic
    from shardwise.zoo.program import ZooProgram

#: Meshes by topology and number of axes, the best known first; each is a product of the physical axes.
MESHES: Final[dict[str, dict[int, tuple[tuple[int, ...], ...]]]] = {
    "v5e:4x4": {1: ((16,),), 2: ((4, 4),)},
    "v3:2x4": {1: ((16,),), 2: ((4, 4), (2, 8))},
    "v5p:2x2x2": {1: ((8,),), 2: ((2, 4), (4, 2))},
}
#: The strategy that the search finds with no hint.
SEARCH: Final = "search"
#: What it finds if no collective hides behind anything, see ``Case.planned_for``.
SERIAL: Final = "search, nothing hidden"
#: Strategies by name: the mesh axes they use, and the tactics as names that `tactics` knows.
STRATEGIES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "replicated": (("data",), ()),
    "dp": (("data",), ("dp data",)),
    "fsdp": (("data",), ("fsdp data",)),
    "zero2": (("data",), ("zero2 data",)),
    "megatron": (("model",), ("megatron model",)),
    "dp+megatron": (("data", "model"), ("dp data", "megatron model")),
    "dp+megatron+sequence": (("data", "model"), ("dp data", "megatron model", "sequence model")),
    "dp+context": (("data", "seq"), ("dp data", "context seq")),
    "fsdp+megatron": (("data", "model"), ("fsdp data", "megatron model")),
    "dp+fsdp": (("data", "model"), ("dp data", "fsdp model")),
    "dp+vocabulary": (("data", "model"), ("dp data", "vocabulary model")),
    "expert": (("data",), ("expert data",)),
    "expert+megatron": (("data", "model"), ("expert data", "megatron model")),
    "expert+fsdp": (("data", "model"), ("expert data", "fsdp model")),
    "edges": (("data",), ("edges data",)),
    "edges+megatron": (("data", "model"), ("edges data", "megatron model")),
    "dp+spatial": (("data", "model"), ("dp data", "spatial model")),
    "rows": (("data",), ("dp data", "rows data")),
    "dp+rows": (("data", "model"), ("dp data", "rows model")),
    "dp+cache": (("data", "model"), ("dp data", "cache model")),
    "megatron+cache": (("data", "model"), ("megatron data", "cache model")),
    SEARCH: (("data", "model"), ("search data",)),
    SERIAL: (("data", "model"), ("search data",)),
}
_LM: Final = (
    "fsdp", "dp+megatron", "dp", "dp+megatron+sequence", "zero2", "fsdp+megatron", "dp+context", "dp+fsdp", "megatron",
    "dp+vocabulary",
)  # fmt: skip
_FORWARD: Final = ("dp+megatron", "dp", "fsdp", "dp+megatron+sequence", "dp+context", "megatron", "replicated")
_VISION: Final = ("dp", "fsdp", "dp+megatron", "zero2", "fsdp+megatron", "dp+spatial", "dp+fsdp")
_SERVING: Final = ("dp+megatron", "dp", "megatron", "fsdp", "dp+cache", "megatron+cache", "replicated")
_MOE: Final = ("expert+megatron", "fsdp", "expert+fsdp", "fsdp+megatron", "dp+megatron", "dp", "expert", "dp+context")


@dataclass(frozen=True, slots=True)
class Program:
    """A program of the zoo and the strategies that make sense for it, the most telling first.

    ``sequence`` and ``tokens`` say where the strategies over the sequence and the vocabulary find them.
    """

    name: str
    config: str | None
    options: tuple[tuple[str, Any], ...]
    strategies: tuple[str, ...]
    sequence: tuple[str, int] = ("batch/inputs", 1)
    vocabulary: tuple[str, int] = ("params/embed", 0)

    @property
    def label(self) -> str:
        words = [self.config] if self.config else []
        for key, value in self.options:
            many = isinstance(value, tuple)
            words.append(f"{key}={('cut' if len(value) > 8 else '-'.join(map(str, value))) if many else value}")
        return f"{self.name}:{','.join(words)}"

    def load(self) -> ZooProgram:
        from shardwise import zoo

        return zoo.load(self.name, self.config, **dict(self.options))


def _program(name: str, strategies: tuple[str, ...], config: str | None = None, **options: Any) -> Program:
    sequence = options.pop("sequence", ("batch/inputs", 1))
    return Program(name, config, tuple(options.items()), strategies, sequence)


_ENCODER: Final = ("batch/encoder_inputs", 1)
_PROMPT: Final = ("batch/tokens", 1)
#: 26 tables as in the data, those of 40 million rows cut to one.
_ROWS: Final = (
    1_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 1_000_000, 1_000_000, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 1_000_000, 1_000_000, 1_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
PROGRAMS: Final = (
    _program("t2b", _LM, layers=3, batch=16, seq=1024),
    _program("gpt", _LM, layers=3, batch=32),
    _program("mlp", (*_LM[:3], "zero2", "fsdp+megatron", "dp+fsdp", "megatron"), layers=4),
    _program("llama3", _LM, layers=2, batch=16, seq=2048),
    _program("mixtral", _MOE, layers=2, batch=16, seq=2048),
    _program("itx", _SERVING, "decode", layers=4, generate=64),
    _program("itx", (*_SERVING[:4], "dp+context"), "prefill", layers=4, batch=64, sequence=_PROMPT),
    _program("vit", _VISION, layers=4, batch=256),
    _program("gns", ("edges", "edges+megatron", "dp", "fsdp", "megatron", "replicated"), layers=4),
    _program("t5", _LM[:7], layers=2, batch=64, sequence=_ENCODER),
    _program("unet", _VISION, batch=32, blocks=1),
    _program("wresnet", _VISION, batch=128, stages=(1, 1, 1, 1)),
    _program("ssm", _LM[:8], layers=2, batch=16, seq=512),
    _program("dlrm", ("fsdp", "rows", "dp+rows", "dp", "zero2", "dp+megatron"), rows=_ROWS),
    _program("llama3", _FORWARD, layers=4, batch=16, seq=2048, train=False),
    _program("t7b", _LM, layers=2, batch=16, seq=1024),
    _program("gpt", _LM[:7], "6.7b", layers=4, batch=64, remat=True),
    _program("itx", _SERVING, "step", layers=8, batch=512),
    _program("llama3", _LM[:6], "70b", layers=2, batch=16, seq=2048),
    _program("mixtral", _MOE[:6], layers=1, batch=16, seq=1024, dropless=True),
    _program("vit", _FORWARD[:3], "h14", layers=4, batch=512, train=False),
    _program("t2b", _LM[:6], layers=4, batch=32, seq=2048, remat=True),
    _program("mlp", ("dp", "fsdp", "dp+megatron", "megatron"), layers=8, train=False),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A program under a strategy on a mesh of a topology."""

    program: Program
    strategy: str
    topology: str
    mesh: tuple[tuple[str, int], ...]

    @property
    def key(self) -> str:
        sizes = "x".join(str(size) for _, size in self.mesh)
        return f"{self.program.label} {self.strategy} {self.topology} {sizes}"

    @property
    def planned_for(self) -> str:
        """The topology, with a profile under which collectives are one after another where the case says so."""
        return _nothing_hidden(self.topology) if self.strategy == SERIAL else self.topology

    @property
    def file(self) -> str:
        """A name for files about the case."""
        return "".join(c if c.isalnum() or c in "+-=." else "_" for c in self.key)

    def tactics(self) -> list[Tactic]:
        return [_tactic(words, self.program) for words in STRATEGIES[self.strategy][1]]


@cache
def _nothing_hidden(topology: str) -> str:
    from shardwise.calibration import calibrate
    from shardwise.hardware.load import BUILT_IN

    name, sizes = topology.split(":")
    shipped = BUILT_IN / f"{name}.toml"
    data = {k: v for k, v in tomllib.loads(shipped.read_text()).items() if k != "hidden"}
    data["sources"] = {k: v for k, v in data["sources"].items() if not k.startswith("hidden")}
    path = Path(tempfile.mkdtemp(prefix="serial")) / f"{name}.toml"
    path.write_text(calibrate.to_toml(data))
    return f"{path}:{sizes}"


def _tactic(words: str, program: Program) -> Any:
    from shardwise.tactics import strategies as s

    name, axis = words.split()
    match name:
        case "dp":
            return s.DataParallel(axis)
        case "fsdp":
            return s.FSDP(axis)
        case "zero2":
            return s.ZeRO2(axis)
        case "megatron":
            return s.Megatron(axis)
        case "sequence":
            return s.SequenceParallel(axis, program.sequence)
        case "context":
            return s.ContextParallel(axis, program.sequence)
        case "vocabulary":
            return s.Shard(*program.vocabulary, axis)
        case "expert":
            return s.ExpertParallel(axis, ("params/layers/experts/gate", 1))
        case "edges":
            return s.EdgeSharding(axis, ("batch/edges", 0))
        case "spatial":
            return s.Shard("batch/images", 1, axis)
        case "rows":
            return _Rows(axis)
        case "cache":
            return s.Shard("cache/k", 2, axis)
        case "search":
            return _Search()
    raise ValueError(f"no tactic is called {name!r}")


@dataclass(frozen=True, slots=True)
class _Search:
    """A search over all axes, for so many evaluations that it finds the same on every machine."""

    evaluations: int = 1000

    def decide(self, context: Any, taken: Any) -> list[Any]:
        from shardwise.cost.model import CostModel
        from shardwise.search.searcher import Options, Searcher
        from shardwise.tactics.baselines import Combinations

        searcher = Searcher.alone(CostModel.of(context.analysis, context.cost), Options(budget_evals=self.evaluations))
        axes = context.mesh.names
        found = searcher.search(taken, axes, lambda: Combinations(context, axes, taken))
        return [] if found is None else list(found.decisions)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of all large embedding tables on an axis."""

    axis: str

    def decide(self, context: Any, taken: Any) -> list[Any]:
        from shardwise.tactics.strategies import Shard

        size = context.mesh.sizes[context.mesh.index(self.axis)]
        made: list[Any] = []
        for table, rows in enumerate(_ROWS):
            if rows >= 10_000 and rows % size == 0:
                made += Shard(f"params/tables/{table}", 0, self.axis).decide(context, [*taken, *made])
        return made


def cases() -> list[Case]:
    """All cases in the order in which they are collected."""
    ordered = [
        *_rounds("v5e:4x4", 0, 99),
        *_rounds("v3:2x4", 0, 3),
        *_rounds("v5p:2x2x2", 0, 3),
        *_rounds("v3:2x4", 3, 99),
        *_rounds("v5p:2x2x2", 3, 99),
    ]
    found = [_case(program, own, "v5e:4x4", 0) for own in (SEARCH, SERIAL) for program in PROGRAMS]
    return list(dict.fromkeys([*_rounds("v5e:4x4", 0, 2), *ordered, *_other_meshes(), *found]))


def _rounds(topology: str, first: int, last: int) -> Iterator[Case]:
    """Strategies by rank: one of every program, then the next of every program."""
    for rank in range(first, min(last, max(len(p.strategies) for p in PROGRAMS))):
        for program in PROGRAMS:
            if rank < len(program.strategies):
                yield _case(program, program.strategies[rank], topology, 0)


def _other_meshes() -> Iterator[Case]:
    for topology, by_axes in MESHES.items():
        for program in PROGRAMS:
            for strategy in program.strategies:
                for place in range(1, len(by_axes[len(STRATEGIES[strategy][0])])):
                    yield _case(program, strategy, topology, place)


def _case(program: Program, strategy: str, topology: str, place: int) -> Case:
    axes = STRATEGIES[strategy][0]
    sizes = MESHES[topology][len(axes)][place]
    return Case(program, strategy, topology, tuple(zip(axes, sizes, strict=True)))
