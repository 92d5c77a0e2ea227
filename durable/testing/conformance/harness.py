"""What a backend author gives the suite: how to open a store, how time passes, and how the caller's own rows are written.

The suite calls it through the fixture `backend_harness`; nothing here knows any backend. A harness is made new for every test and
starts from empty data. It never looks into a store: all that the suite checks, it checks through the protocol.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

from durable.errors import StoreUnavailable
from durable.protocol import Store
from durable.settings import Micros


class CallerTransaction(Protocol):
    """A transaction of the application on its own connection; `native` is what users would pass as `tx=`."""

    native: object

    async def commit(self) -> None:
        """Commit it; the context manager that gave it does nothing more then."""
        ...

    async def rollback(self) -> None:
        """Roll it back; the context manager that gave it does nothing more then."""
        ...


class Harness(Protocol):
    """One backend under test, on data of its own."""

    name: str

    async def open(self, *, shared: bool = False) -> Store:
        """Open a store that has its tables.

        `shared=False`: on data that nobody else reaches (the quickest that the backend has). `shared=True`: on the harness's one
        set of shared data; a second call opens an independent store on the same data, as a second process would have it.
        The harness closes what it opened.
        """
        ...

    async def pass_time(self, micros: Micros, /) -> None:
        """Let the store's clock move on.

        Where the clock is the server's, either wait, or move every stored instant back by as much: to the rows it is the same.
        Tests therefore compare instants only with others read after the last call of this.
        """
        ...

    def caller_transaction(self) -> AbstractAsyncContextManager[CallerTransaction]:
        """A transaction of the application on the shared data; rolled back at the end unless committed."""
        ...

    async def write_row(self, native: Any, text: str, /) -> None:
        """Write a row of the application through the native connection (that of `caller_transaction` or of `transaction`)."""
        ...

    async def rows(self) -> list[str]:
        """The application's committed rows on the shared data, in the order of writing."""
        ...


class FaultyStore:
    """A store between which and its caller answers get lost.

    `fault="after"`: the next call is carried out and its answer thrown away. `fault="before"`: it is not carried out. Both raise
    StoreUnavailable, once; then everything passes. An author whose driver can be cut for real may give the suite something
    sharper through the fixture `faulty`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._fault: Literal["before", "after"] | None = None

    def fail_next(self, fault: Literal["before", "after"]) -> None:
        """Let the next call fail, before or after it has done its work."""
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        method: Any = getattr(self._store, name)
        if name in ("capabilities", "settings", "clock", "close"):
            return method

        async def call(*positional: Any, **named: Any) -> Any:
            fault, self._fault = self._fault, None
            if fault == "before":
                raise StoreUnavailable(f"{name}: the connection was gone before the call")
            answer = await method(*positional, **named)
            if fault == "after":
                raise StoreUnavailable(f"{name}: the answer was lost")
            return answer

        return call
