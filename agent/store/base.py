"""What a store is: documents with versions, written by compare-and-set.

Owns the interface alone.  sqlite.py implements it for one node; a store for many nodes adds leases
and watches behind the same names.
"""

from __future__ import annotations

from typing import Protocol

from ..core.model import StoreView, StoreWrite


class StoreError(Exception):
    """The store cannot be used; the text names the file or address and what to set."""


class Conflict(Exception):
    """A compare-and-set found another version than expected; nothing was changed."""


class Store(Protocol):
    """Documents with compare-and-set.  Calls return at once or raise; none of them hangs."""

    def view(self) -> StoreView:
        """What the store said last, and whether it answers."""

    async def put(self, write: StoreWrite) -> int:
        """Writes a document if its version is the expected one; returns the new version.

        Raises Conflict when it is not, StoreError when the store did not take it, and
        TimeoutError when it is not known whether it did.
        """

    async def refresh(self) -> None:
        """Finds out again what the store holds and whether it answers."""

    def close(self) -> None:
        """Lets go of files, locks and connections."""
