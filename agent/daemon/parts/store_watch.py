"""Follows the store: what others write, and whether one that failed answers again.

Owns nothing but the wake-up: how a store is followed is its own, and SQLite's is asked only after
it failed.
"""

from __future__ import annotations

from collections.abc import Callable

from ...store.base import Store


class StoreWatch:
    name = "store"

    def __init__(self, store: Store, wake: Callable[[str], None]) -> None:
        self._store, self._wake = store, wake

    async def run(self) -> None:
        await self._store.watch(self._wake)
