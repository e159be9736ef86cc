"""A cache with a fixed number of slots that forgets what was used least recently.

Entries may also expire. Time is passed in as a function, so that tests can move the clock
without sleeping.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable, Generic, Hashable, Iterator, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass
class Entry(Generic[V]):
    value: V
    expires_at: float | None

    def is_stale(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at


@dataclass
class Stats:
    hits: int = 0
    misses: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        total = self.hits + self.misses
        return self.hits / total if total else 0.0


class RingCache(Generic[K, V]):
    def __init__(
        self,
        capacity: int,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._capacity = capacity
        self._ttl = ttl
        self._clock = clock
        self._entries: OrderedDict[K, Entry[V]] = OrderedDict()
        self.stats = Stats()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not entry.is_stale(self._clock())

    def __iter__(self) -> Iterator[K]:
        now = self._clock()
        return (key for key, entry in self._entries.items() if not entry.is_stale(now))

    def get(self, key: K, default: V | None = None) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            self.stats.misses += 1
            return default
        if entry.is_stale(self._clock()):
            del self._entries[key]
            self.stats.misses += 1
            return default
        self._entries.move_to_end(key)
        self.stats.hits += 1
        return entry.value

    def put(self, key: K, value: V, ttl: float | None = None) -> None:
        lifetime = self._ttl if ttl is None else ttl
        expires_at = None if lifetime is None else self._clock() + lifetime
        self._entries[key] = Entry(value, expires_at)
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
            self.stats.evictions += 1

    def get_or_compute(self, key: K, compute: Callable[[K], V]) -> V:
        """Return the cached value, or compute, store and return it."""
        missing = object()
        found = self.get(key, missing)  # type: ignore[arg-type]
        if found is not missing:
            return found  # type: ignore[return-value]
        value = compute(key)
        self.put(key, value)
        return value

    def purge(self) -> int:
        """Drop everything that has expired and say how many entries that were."""
        now = self._clock()
        stale = [key for key, entry in self._entries.items() if entry.is_stale(now)]
        for key in stale:
            del self._entries[key]
        return len(stale)


def main() -> None:
    squares: RingCache[int, int] = RingCache(capacity=3)
    for number in [1, 2, 3, 1, 4, 2, 1]:
        squares.get_or_compute(number, lambda n: n * n)
    print(f"kept {sorted(squares)}, hit rate {squares.stats.hit_rate:.0%}")


if __name__ == "__main__":
    main()
