"""Primitives whose dimensions are chosen by parameters: triangular solves, Fourier transforms, keys and random bits."""

from __future__ import annotations

from shardwise.ir.rule import Rule
from shardwise.rules.call import OpCall, RuleBuilder


def triangular_solve(call: OpCall) -> Rule:
    """Each right-hand side is solved for on its own; a solve is sequential along the matrix."""
    b = RuleBuilder(call)
    out, rank = call.out(), len(call.operands[1])
    solved, free = (rank - 2, rank - 1) if call.params["left_side"] else (rank - 1, rank - 2)
    for d in range(rank - 2):
        b.add([(0, d), (1, d), (out, d)])
    b.add([(1, free), (out, free)])
    reason = "each unknown needs those solved before it"
    b.block([(1, solved), (out, solved)], reason)
    b.block_apart([(0, rank - 2), (0, rank - 1)], reason)
    return b.build()


def fft(call: OpCall) -> Rule:
    """The transformed dimensions are whole; a real transform changes the size of the last one."""
    rank = len(call.operands[0])
    transformed = len(call.params["fft_lengths"])
    b = RuleBuilder(call)
    out = call.out()
    for d in range(rank):
        if d < rank - transformed:
            b.add([(0, d), (out, d)])
        elif call.operands[0][d] == call.results[0][d]:
            b.block([(0, d), (out, d)], "every frequency needs every position")
        else:
            b.block_apart([(0, d), (out, d)], "every frequency needs every position")
    return b.build()


def keys_then_shape(call: OpCall) -> Rule:
    """``random_bits``, ``random_split``: ``(keys…) -> (keys…, shape…)``, the shape being made position by position."""
    b = RuleBuilder(call)
    out = call.out()
    keys = len(call.operands[0])
    for d in range(len(call.results[0])):
        b.add([*([(0, d)] if d < keys else []), (out, d)])
    return b.build()


def key_data(call: OpCall) -> Rule:
    """``random_wrap`` and ``random_unwrap``: the words of one key are its last dimension."""
    b = RuleBuilder(call)
    out = call.out()
    shared = min(len(call.operands[0]), len(call.results[0]))
    for d in range(shared):
        b.add([(0, d), (out, d)])
    for t in (0, out):
        b.block_apart(((t, d) for d in range(shared, len(call.shape(t)))), "the words of one key")
    return b.build()


def rng_bit_generator(call: OpCall) -> Rule:
    """``(key) -> (new key), (bits…)``. The bits depend on the key and on the position only, so that every device can make
    its own; the partitioner lets each make all of them and keep a part."""
    b = RuleBuilder(call)
    for t in range(len(call.operands) + 1):
        b.block_apart(((t, d) for d in range(len(call.shape(t)))), "the words of one key")
    for d in range(len(call.results[1])):
        b.add([(call.out(1), d)])
    return b.build()


def iota_2x32_shape(call: OpCall) -> Rule:
    b = RuleBuilder(call)
    for d in range(len(call.results[0])):
        b.add([(call.out(r), d) for r in range(len(call.results))])
    return b.build()


def random_gamma(call: OpCall) -> Rule:
    """``(keys…), (keys…, shape…) -> (keys…, shape…)``: each position derives its key from its number in the flattened
    array. Of an array under one key the major dimension can be split; the others are minor parts of the flat one."""
    b = RuleBuilder(call)
    out, keys, shape = call.out(), len(call.operands[0]), call.results[0]
    major = next((d for d, size in enumerate(shape) if size > 1), 0)
    for d in range(len(shape)):
        if d < keys:
            b.add([(0, d), (1, d), (out, d)])
        elif d == major:
            b.add([(1, d), (out, d)])
        else:
            b.block([(1, d), (out, d)], "each position derives its own key from its flat number")
    return b.build()
