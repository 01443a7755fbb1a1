"""The search finds the strategies that people know, with no hint; and leaves them where one number says that they do not pay.

Every test has a program in which a strategy pays, and changes one number of the program or of the hardware so that it does not.
What is asserted is structure: which dimensions of arguments carry the axis at rest, and on which dimension products compute.
Beside it stands that what was found is no worse than the named strategy of ``shardwise.tactics.baselines``. Programs of the zoo
are at their real widths with one or two layers; the search has a few hundred evaluations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from shardwise import zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.ir.program import Op, Unit
from shardwise.lowering.decisions import State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, lower_state
from shardwise.lowering.storage import views
from shardwise.planner.inquiry import Inquiry
from shardwise.search.mcts import mcts
from shardwise.search.problem import Problem
from shardwise.search.run import Budget, SearchResult
from shardwise.tactics.baselines import baselines
from shardwise.tactics.tactic import Context

GIB = 2**30
ROLES = {"params": ("params",), "optimizer": ("opt_state",), "batch": ("batch",)}
Dims = tuple[str, ...]


@cache
def analyzed(text: str) -> Analysis:
    program = zoo.parse(text)
    return analyze_program(
        lower(trace(program.fn, program.args, {}, JitOptions(donate_argnums=program.donate_argnums)))
    )


@dataclass(frozen=True)
class Searched:
    """The best state that was found."""

    problem: Problem
    found: SearchResult
    lowered: Lowered

    def spec(self, path: str) -> Dims:
        """The axes of an argument's dimensions, ``-`` where there is none."""
        return self._dims(self.lowered.storage[self.lowered.program.paths[path]].dims)

    def made(self, path: str) -> Dims:
        """The axes of what the first product with an argument computes, reductions left to do."""
        return self._dims(self.lowered.computed(self._product(path), 0).dims)

    def _product(self, path: str) -> Op:
        program = self.lowered.program
        seen = views(program, [program.paths[path]])
        return next(op for op in program.schedule if op.unit is Unit.MATRIX and seen.intersection(op.operands))

    def _dims(self, dims: tuple[tuple[int, ...], ...]) -> Dims:
        return tuple("·".join(self.problem.mesh.names[a] for a in axes) or "-" for axes in dims)

    def whole(self, paths: str) -> bool:
        """Are all arguments below some path whole?"""
        return all(set(self.spec(p)) <= {"-"} for p in self._below(paths))

    def sharded(self, paths: str) -> bool:
        """Are all matrices below some path sharded?"""
        values, known = self.lowered.program.values, self.lowered.program.paths
        matrices = [p for p in self._below(paths) if sum(size > 1 for size in values[known[p]].shape) > 1]
        return all(set(self.spec(p)) > {"-"} for p in matrices if values[known[p]].nbytes > 2**20)

    def _below(self, paths: str) -> list[str]:
        found = [a.path for a in self.lowered.program.arguments if a.path.startswith(paths)]
        assert found, paths
        return found

    def beats(self, *strategy: str) -> bool:
        """Is it no worse than a named strategy on the first axis, by more than the half percent that simplifying may cost?"""
        analysis, model = self.problem.analysis, self.problem.model
        context = Context(analysis, self.problem.mesh, model.cost, ROLES)
        (best,) = [b for b in baselines(context, model, [strategy]) if b.applies and b.parts]
        assert best.cost is not None
        settled = Inquiry(model).settle(self.problem.decisions(self.found.best.state)).predicted
        return (settled.fits, -settled.time_s) >= (best.fits, -1.005 * best.cost.time_s)


def search(
    text: str, where: str = "v5e:2x4", memory_bytes: float = 0, evaluations: int = 500, hides: bool = True, **mesh: int
) -> Searched:
    """Searches a program of the zoo; ``memory_bytes``: what is usable of a device's memory, if not what the profile says;
    ``hides``: whether collectives run beside compute."""
    analysis, found = analyzed(text), topology(where)
    if not hides:
        found = replace(found, profile=replace(found.profile, hidden=(), rings=False))
    if memory_bytes:
        memory = int(memory_bytes / found.profile.usable_share)
        found = replace(found, profile=replace(found.profile, memory_bytes=memory))
    cost = HardwareCost(place(MeshAxes.of(mesh or {"x": 8}), found))
    problem = Problem(CostModel.of(analysis, cost))
    best = mcts(problem, Budget(seconds=600, evaluations=evaluations), seed=0)
    assert best.fits
    return Searched(problem, best, lower_state(analysis, State(problem.mesh, problem.decisions(best.best.state)), cost))


DEEP = "mlp:layers=48,features=512,width=512,classes=512,scan,remat"


def test_data_parallelism() -> None:
    """A large batch of a small model, where nothing hides: gathers that do would make sharded parameters as quick. A small
    batch is not worth the reduction of the gradients: nothing is sharded."""
    many = search(f"{DEEP},batch=32768", hides=False)
    assert many.spec("batch/inputs") == ("x", "-") and many.whole("params") and many.whole("opt_state")
    assert many.made("params/hidden/kernel") == ("x", "-") and many.beats("dp")
    few = search(f"{DEEP},batch=512")
    assert few.whole("batch") and few.whole("params") and few.whole("opt_state") and few.beats("dp")


def test_zero3() -> None:
    """The same model where parameters and moments do not fit, whole or as in ZeRO-2: they are sharded with the batch."""
    tight = search(f"{DEEP},batch=8192", memory_bytes=0.125 * GIB)
    assert tight.spec("batch/inputs") == ("x", "-") and tight.sharded("params") and tight.sharded("opt_state")
    assert tight.made("params/hidden/kernel") == ("x", "-"), "weights are gathered, examples stay"
    roomy = search(f"{DEEP},batch=8192", hides=False)
    assert roomy.spec("batch/inputs") == ("x", "-") and roomy.whole("params") and roomy.whole("opt_state")
    assert tight.beats("fsdp") and tight.beats("zero2") and roomy.beats("dp")


def test_megatron() -> None:
    """One example: heads and hidden units are shared out, with the sequence beside them. Many: the batch is."""
    one = search("gpt:layers=2,batch=1,remat")
    layers = "params/layers"
    assert one.spec(f"{layers}/qkv/kernel") == ("-", "-", "-", "x", "-") and one.made(f"{layers}/qkv/kernel")[3] == "x"
    assert one.spec(f"{layers}/out/kernel") == ("-", "x", "-", "-")
    assert one.spec(f"{layers}/up/kernel") == ("-", "-", "x") and one.made(f"{layers}/up/kernel") == ("-", "-", "x")
    assert one.spec(f"{layers}/down/kernel") == ("-", "x", "-")
    assert one.beats("megatron", "sequence", "vocabulary")
    many = search("gpt:layers=2,batch=64,remat")
    assert many.spec("batch/inputs") == ("x", "-")
    assert many.made(f"{layers}/qkv/kernel")[0] == many.made(f"{layers}/up/kernel")[0] == "x" and many.beats("fsdp")


def test_context_parallelism() -> None:
    """One long sequence: queries stay where their tokens are, keys and values are gathered. Eight: one to each device."""
    text = "llama3:layers=1,seq=16384,vocab=32000,remat"
    one = search(f"{text},batch=1", "v5p:2x2x2", evaluations=800)
    assert one.spec("batch/inputs") == ("-", "x")
    for name in ("attention/q", "attention/o", "mlp/up", "mlp/down"):
        assert one.made(f"params/layers/{name}")[1] == "x", "all of a token is computed where it is"
    assert scores(one) == {("-", "-", "-", "x", "-")} and one.beats("context")
    eight = search(f"{text},batch=8", "v5p:2x2x2", evaluations=800)
    assert eight.spec("batch/inputs") == ("x", "-") and scores(eight) == {("x", "-", "-", "-", "-")}


def scores(searched: Searched) -> set[Dims]:
    """How the arrays that are as large as the sequence squared lie: (batch, groups, heads, queries, keys)."""
    life, values = searched.problem.model.life, searched.lowered.program.values
    square = [v for v in life.live if values[v].shape[-2:] == (16384, 16384)]
    assert square
    return {searched._dims(searched.lowered.actual[v].dims) for v in square}


def test_expert_parallelism() -> None:
    """With few tokens it is they that travel to the experts; with many, the experts' weights travel to them."""
    text, names = "mixtral:layers=2,remat", ("up", "gate", "down")
    few = search(f"{text},batch=16", memory_bytes=100 * GIB, evaluations=800)
    assert few.spec("batch/inputs") == ("x", "-") and few.beats("expert")
    for name in names:
        assert few.spec(f"params/layers/experts/{name}") == ("-", "x", "-", "-")
        assert few.made(f"params/layers/experts/{name}")[0] == "x"
    many = search(f"{text},batch=128", memory_bytes=100 * GIB, evaluations=800)
    assert many.spec("batch/inputs") == ("x", "-") and many.beats("expert") and many.beats("fsdp")
    assert all(many.made(f"params/layers/experts/{name}")[0] == "-" for name in names), "however they are stored"


def test_edge_sharding() -> None:
    """Messages are the work where there are many edges; where there are few, the nodes and the networks are shared out."""
    text, arrays = "gns:layers=2", ("edges", "senders", "receivers")
    many = search(f"{text},edges=65536")
    assert all(many.spec(f"batch/{name}")[0] == "x" for name in arrays) and many.beats("edges")
    few = search(f"{text},edges=512")
    assert all(few.spec(f"batch/{name}")[0] == "-" for name in arrays) and few.beats("edges")
    assert few.spec("batch/nodes")[0] == "x" and few.sharded("params/steps/node/dense/2/kernel")


def test_decoding() -> None:
    """Many sequences: the cache is shared out by sequence, and the weights on both axes. One: weights on both."""
    mesh: dict[str, Any] = {"where": "v5e:4x4", "x": 4, "y": 4}
    many = search("itx:decode,layers=2,batch=256", **mesh)
    assert many.spec("cache/k") == many.spec("cache/v") == ("-", "x·y", "-", "-")
    assert many.spec("batch/tokens") == ("x·y",)
    assert many.spec("params/layers/up") == ("-", "-", "x·y") and many.spec("params/layers/down") == ("-", "x·y", "-")
    one = search("itx:decode,layers=2,batch=1", **mesh)
    assert set("·".join(one.spec("params/layers/up")).split("·")) >= {"x", "y"}
    assert one.spec("cache/k")[1] == "-"
