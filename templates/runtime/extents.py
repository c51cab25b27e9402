"""Extents that are not known yet: products of named sizes, and how shapes of results are found in terms of them.

An op infers shapes from numbers. So a graph asks it twice, with numbers that have large primes as factors, and reads off what each
extent of a result is made of.

    batch = Extent.named("batch")
    str(batch * 2)                     # "2*batch"
    (batch * 2).at({"batch": 3})       # 6
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .layout import ShapeError

_STEP = 5040
"""What a trial size is a multiple of, so that halves, thirds and heads of it are whole."""
_PRIMES = (
    (1048583, 1048589, 1048601, 1048609, 1048613, 1048627, 1048633, 1048661),
    (2097169, 2097211, 2097223, 2097229, 2097257, 2097259, 2097287, 2097289),
)
"""One for each unknown size, in each of the two trials. No known extent has one as a factor: it would be read as a size; then the two
trials differ, and it is an error."""


@dataclass(frozen=True)
class Extent:
    """A factor times powers of named sizes."""

    factor: Fraction
    powers: tuple[tuple[str, int], ...]

    @staticmethod
    def named(name: str) -> Extent:
        return Extent(Fraction(1), ((name, 1),))

    def at(self, sizes: Mapping[str, int]) -> int:
        """The number. Raises ShapeError where it is not whole, KeyError where a size is missing."""
        if any(p < 0 and sizes[n] == 0 for n, p in self.powers):
            raise ShapeError(f"{self} has no value where {', '.join(n for n, p in self.powers if p < 0)} is 0")
        value = self.factor * math.prod(Fraction(sizes[n]) ** p for n, p in self.powers)
        if value.denominator != 1:
            raise ShapeError(f"{self} is {value} where {', '.join(f'{n} is {sizes[n]}' for n, _ in self.powers)}")
        return int(value)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n, _ in self.powers)

    def __mul__(self, other: Size) -> Size:
        return product((self, other))

    __rmul__ = __mul__

    def __str__(self) -> str:
        above = [str(self.factor.numerator)] if self.factor.numerator != 1 else []
        above += [n for n, p in self.powers for _ in range(p)]
        below = [str(self.factor.denominator)] if self.factor.denominator != 1 else []
        below += [n for n, p in self.powers for _ in range(-p)]
        return "/".join(["*".join(above) or "1", *below])


NO_PRODUCT = "an extent of a result is no product of the sizes that are not known: give them as numbers"

Size = int | Extent
"""An extent of a recorded tensor: a number, or one that is not known yet."""


def _parts(size: Size) -> tuple[Fraction, dict[str, int]]:
    return (size.factor, dict(size.powers)) if isinstance(size, Extent) else (Fraction(size), {})


def _simple(factor: Fraction, powers: Mapping[str, int]) -> Size:
    own = tuple(sorted((n, p) for n, p in powers.items() if p))
    if not own and factor.denominator == 1:
        return int(factor)
    return Extent(factor, own)


def product(sizes: Iterable[Size]) -> Size:
    factor, powers = Fraction(1), dict[str, int]()
    for size in sizes:
        own, names = _parts(size)
        factor *= own
        for name, power in names.items():
            powers[name] = powers.get(name, 0) + power
    return _simple(factor, powers)


def quotient(a: Size, b: Size) -> Size:
    """a / b; an Extent without names if it is no whole number. Raises ZeroDivisionError."""
    (above, own), (below, theirs) = _parts(a), _parts(b)
    return _simple(above / below, {n: own.get(n, 0) - theirs.get(n, 0) for n in {**own, **theirs}})


def concrete(shape: Sequence[Size], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape in numbers."""
    return tuple(s.at(sizes) if isinstance(s, Extent) else s for s in shape)


def text(shape: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, shape))}]"


@dataclass(frozen=True)
class Trials:
    """Numbers for sizes that are not known: two sets, of which each number has a prime of its own."""

    sizes: tuple[dict[str, int], dict[str, int]]
    primes: tuple[dict[str, int], dict[str, int]]

    @staticmethod
    def of(names: Sequence[str]) -> Trials:
        """Raises ShapeError beyond eight names."""
        if len(names) > len(_PRIMES[0]):
            raise ShapeError(f"a graph has at most {len(_PRIMES[0])} sizes that are not known: {', '.join(names)}")
        first, second = (dict(zip(names, primes)) for primes in _PRIMES)
        return Trials(
            ({n: _STEP * p for n, p in first.items()}, {n: _STEP * p for n, p in second.items()}), (first, second)
        )

    def recover(self, shapes: Sequence[Sequence[int]]) -> tuple[Size, ...]:
        """What a result's extents are in terms of the sizes, from its shape in each trial."""
        first, second = shapes
        if len(first) != len(second):
            raise ShapeError("the rank of a result depends on a size that is not known")
        return tuple(self._extent(pair) for pair in zip(first, second))

    def told(self, message: str) -> str:
        """A message about the first trial, with what its numbers stand for."""

        def word(found: re.Match[str]) -> str:
            number = int(found[0])
            if all(number % prime for prime in self.primes[0].values()):
                return found[0]
            return str(self._made(number, 0))

        return re.sub(r"\d{7,}", word, message)

    def _extent(self, pair: tuple[int, int]) -> Size:
        first, second = (self._made(extent, trial) for trial, extent in enumerate(pair))
        if first != second:
            raise ShapeError(NO_PRODUCT)
        return first

    def _made(self, extent: int, trial: int) -> Size:
        factor, powers = Fraction(extent), dict[str, int]()
        for name, prime in self.primes[trial].items():
            while extent and factor.numerator % prime == 0:
                factor /= self.sizes[trial][name]
                powers[name] = powers.get(name, 0) + 1
        return _simple(factor, powers)
