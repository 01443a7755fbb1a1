"""Linear algebra, Fourier transforms and random numbers."""

from __future__ import annotations

from shardwise.errors import RuleError
from shardwise.rules.call import Place, RuleBuilder, pointwise
from shardwise.rules.tables import LINEAR_ALGEBRA


def linear_algebra(b: RuleBuilder) -> None:
    """Adds the factors that :data:`~shardwise.rules.tables.LINEAR_ALGEBRA` has for an op."""
    forms = [[side.split(",") for side in form.split("->")] for form in LINEAR_ALGEBRA[b.call.kind]]
    counts = [len(b.operands), len(b.results)]
    tensors = next(([*ins, *outs] for ins, outs in forms if [len(ins), len(outs)] == counts), None)
    if tensors is None:
        raise RuleError(f"{b.call.kind}: no form for {counts[0]} operands and {counts[1]} results")
    for d in range(len(b.shapes[0]) - len(tensors[0])):
        b.add([(t, d) for t in b.tensors])
    places: dict[str, list[Place]] = {}
    for t, letters in enumerate(tensors):
        for d, letter in enumerate(letters, len(b.shapes[t]) - len(letters)):
            places.setdefault(letter, []).append((t, d))
    for letter, placed in places.items():
        if letter.isupper():
            b.add(placed)
        else:
            b.block(placed, "factorizing or solving needs the complete matrix")


def triangular_solve(b: RuleBuilder) -> None:
    """Right-hand sides are independent; a solve is sequential along the matrix."""
    rank = len(b.operands[1])
    solved, free = (rank - 2, rank - 1) if b.params["left_side"] else (rank - 1, rank - 2)
    for d in range(rank - 2):
        b.add([(0, d), (1, d), (b.out, d)])
    b.add([(1, free), (b.out, free)])
    reason = "each unknown needs those solved before it"
    b.block([(1, solved), (b.out, solved)], reason)
    b.block_rest(reason)


def fft(b: RuleBuilder) -> None:
    """The transformed dimensions are blocked; a real transform changes the size of the last one."""
    rank, count = len(b.operands[0]), len(b.params["fft_lengths"])
    pointwise(b, dict.fromkeys(range(rank - count, rank), "every frequency needs every position"))


def rng_bit_generator(b: RuleBuilder) -> None:
    """``(key) -> (new key), (bits…)``. Bits depend on the key and the position only: every device can compute its part."""
    b.block_apart([(t, d) for t in range(b.out + 1) for d in range(len(b.shapes[t]))], "the words of one key")
    for d in range(len(b.results[1])):
        b.add([(b.out + 1, d)])


def _random_keys(b: RuleBuilder, count: int) -> int:
    """Adds the leading dimensions, those of an array of keys, and returns their number. What the device's generator (``rbg``)
    makes of several keys depends on the first key and on their number."""
    for d in range(count):
        places = [(t, d) for t in b.tensors if d < len(b.shapes[t])]
        if b.call.dtypes[:1] == ("key<fry>",):
            b.add(places)
        else:
            b.block(places, "random numbers are made for all keys together")
    return count


def random_numbers(b: RuleBuilder) -> None:
    """``(keys…) -> (keys…, shape…)``, or ``(keys…), (data…) -> (keys…)``, where either may be one for all."""
    for d in range(_random_keys(b, max(map(len, b.operands))), len(b.results[0])):
        b.add([(b.out, d)])


def random_gamma(b: RuleBuilder) -> None:
    """``(keys…), (keys…, shape…) -> (keys…, shape…)``: each position derives its key from its number in the flattened array, of
    which the major dimension can be split."""
    keys, shape = _random_keys(b, len(b.operands[0])), b.results[0]
    major = next((d for d, size in enumerate(shape) if size > 1), 0)
    for d in range(keys, len(shape)):
        if d == major:
            b.add([(1, d), (b.out, d)])
        else:
            b.block([(1, d), (b.out, d)], "each position derives a key from its flat index")
