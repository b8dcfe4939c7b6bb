"""Finds out whether a store that failed answers again.

Owns the pause between two questions; while the store answers it asks none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...store.sqlite import SqliteStore

RETRY_S = 1.0


class StoreWatch:
    name = "store"

    def __init__(self, store: SqliteStore, wake: Callable[[str], None]) -> None:
        self._store, self._wake = store, wake

    async def run(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            if self._store.problem and await self._store.save():
                self._wake("the store's disk takes writes again")
            if not self._store.view().up:
                await self._store.refresh()
                if self._store.view().up:
                    self._wake("store is back")
