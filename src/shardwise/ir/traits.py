"""The traits of ops by name: what other modules need to know about an op besides its rule. Names are those of JAX primitives,
and of ops that capture adds: ``argument``, ``constant``, ``output``, ``scan.input`` and the like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shardwise.ir.program import Op, Program

#: Ops at the borders of a program.
BORDERS: Final = frozenset({"argument", "constant", "output"})
#: Collectives that a program can contain itself, in a ``shard_map``, by their name in compiled programs.
MANUAL: Final = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "all-gather"),
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}

# Views.

#: Ops whose result is their operand in another shape, order or type. A view of a parameter is ready as early as the parameter,
#: and a view of a value that is kept replicated is replicated.
VIEWS: Final = frozenset(
    "convert_element_type copy optimization_barrier reshape scan.const scan.input scan.output squeeze transpose".split()
)
#: Ops whose result has the elements of their operand, some of them several times.
SAME_ELEMENTS: Final = VIEWS | {"broadcast_in_dim"}
#: Links between a loop and its body that read or write one slice.
LOOP_SLICES: Final = frozenset({"scan.input", "scan.output"})

# Parts of arrays.

#: Scatters by the way in which they combine old and new elements; "" where the new ones replace the old ones.
SCATTERS: Final = {
    "scatter": "",
    "scatter-add": "sum",
    "scatter-sub": "sum",
    "scatter-mul": "prod",
    "scatter-min": "min",
    "scatter-max": "max",
}
#: Scatters that add their updates.
ADDING_SCATTERS: Final = frozenset({"scatter-add"})
#: Ops that read no more of their first operand than they return.
READ_PARTS: Final = frozenset({"dynamic_slice", "gather", "scan.input", "slice", "split"})
#: Ops that write one operand into a part of their result, by the number of that operand.
WRITE_PARTS: Final = {"scan.output": 0, "dynamic_update_slice": 1, **dict.fromkeys(SCATTERS, 2)}
#: Ops whose result takes the memory of their first operand, if that is not used later.
IN_PLACE: Final = frozenset({"dynamic_update_slice", *SCATTERS})

#: Ops that can move an array between the memory of the host and that of the device (``is_transfer``).
_MOVING: Final = frozenset({"device_put"})

# Linearity.

SUMS: Final = frozenset({"add", "add_any"})
#: Ops through which a partial sum can pass: the operands in which they are linear, one at a time, while the others are
#: replicated; None where they are linear in all operands at once. ``linear_operands`` knows the exceptions by type.
LINEAR: Final[dict[str, tuple[int, ...] | None]] = {
    **dict.fromkeys(("add", "add_any", "sub"), None),
    **dict.fromkeys("convert_element_type copy div neg reduce_sum reshape squeeze transpose".split(), (0,)),
    "mul": (0, 1),
}
#: Types to which partial sums of floating-point numbers may be converted: they have the range of float32.
_RANGES: Final = frozenset({"bfloat16", "float32", "float64"})

# Types.

#: JAX's name scope of what is rematerialized for a backward pass.
REMATERIALIZED: Final = "rematted_computation"
#: The name (``checkpoint_name``) that marks the dimension of stages in a program with pipelines.
STAGES: Final = "pipeline stages"
#: Types that hold every value of a narrower one; all of them hold those of ``bool``.
WIDER: Final = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
    "int8": ("int16", "int32", "int64"),
    "int16": ("int32", "int64"),
    "int32": ("int64",),
    "uint8": ("uint16", "uint32", "uint64", "int16", "int32", "int64"),
    "uint16": ("uint32", "uint64", "int32", "int64"),
    "uint32": ("uint64", "int64"),
}


def is_transfer(program: Program, op: Op) -> bool:
    """Returns whether an op moves an array between the memory of the host and that of the device."""
    if op.kind not in _MOVING or op.operands[0] < 0:
        return False
    return program.values[op.operands[0]].host != program.values[op.results[0]].host


def linear_operands(program: Program, op: Op) -> tuple[int, ...] | None:
    """Returns the operands in which an op is linear, one at a time; None where it is linear in all of them at once."""
    if op.kind == "convert_element_type" and op.operands[0] >= 0:
        old, new = (program.values[v] for v in (op.operands[0], op.results[0]))
        kinds = {_number_kind(value.dtype) for value in (old, new)}
        if kinds == {"integer"}:  # what wrapped around in a short type is another number in a longer one
            return (0,) if new.itemsize <= old.itemsize else ()
        # Sums of large addends can be small; a type of a smaller range does not hold the addends.
        return (0,) if kinds == {"real"} and new.dtype in _RANGES else ()
    if op.kind in ADDING_SCATTERS:
        return (2,)
    if op.kind == "div" and _number_kind(program.values[op.results[0]].dtype) != "real":
        return ()
    return LINEAR.get(op.kind, ())


def _number_kind(dtype: str) -> str:
    return "real" if "float" in dtype else "integer" if "int" in dtype else dtype
