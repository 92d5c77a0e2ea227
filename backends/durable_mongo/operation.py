"""What an operation of this backend works with: the collections, the transaction it is in (if any), the clock, and a place for news.

The modules named after the operations (`enqueue.py`, `claim.py`, …) are written in the words of `Work`. `connection.py` makes one for
each try of a transaction or a plain call, `transactions.py` one on a caller's own session. All writes of an operation inside a
transaction stand and fall together; outside of one, each is a write of its own. Nothing here knows a collection's meaning.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import pymongo
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import ReadPreference, UpdateMany, UpdateOne
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from durable.model import Instant
from durable.settings import Settings
from durable.storekit import Renames

from .times import ServerClock

T = TypeVar("T")
Document: TypeAlias = dict[str, Any]
Where: TypeAlias = Mapping[str, Any]
Change: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]]"
"""An update with operators, or a pipeline (see `changes.py`)."""

MAJORITY: Final = WriteConcern("majority")
"""On every handle of ours, whatever the URI says: w:1, with or without j, loses acknowledged writes at a fail-over (65). No j, no
wtimeout: the one makes a single node wait 100 ms, the other answers "perhaps"."""
SETTLED: Final = ReadConcern("majority")
CODEC: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, tz_aware=False
)


_BY_ID: Final = [("_id", 1)]


def _hint(where: Where) -> Any:
    """Who names documents by `_id` means them: without a hint the server also tries the indexes of what else the filter says, at each
    of a hundred updates anew, and may settle for one that walks through everything that runs."""
    return _BY_ID if "_id" in where else None


class NativeDatabase(Protocol):
    """A database object of the driver: PyMongo's own, or Motor's."""

    @property
    def get_collection(self) -> Callable[..., Any]: ...


class Tables:
    """The collections of one client, with our own options on each."""

    def __init__(self, database: NativeDatabase, renames: Renames) -> None:
        self._database = database
        self._renames = renames
        self._known: dict[str, Any] = {}

    def name_of(self, table: str) -> str:
        """The configured name of a collection."""
        return self._renames.table(table)

    def quick(self, table: str) -> Any:
        """The collection as the primary alone has it."""
        return self[table].with_options(write_concern=WriteConcern(1), read_concern=ReadConcern("local"))

    def __getitem__(self, table: str) -> Any:
        found = self._known.get(table)
        if found is None:
            found = self._known[table] = self._database.get_collection(
                self._renames.table(table),
                codec_options=CODEC,
                write_concern=MAJORITY,
                read_concern=SETTLED,
                read_preference=ReadPreference.PRIMARY,
            )
        return found


class Work:
    """One try of an operation."""

    __slots__ = ("_session", "_tables", "clock", "now", "settings", "topics")

    def __init__(self, tables: Tables, session: Any, clock: ServerClock, settings: Settings) -> None:
        self._tables = tables
        self._session = session
        self.clock = clock
        self.now: Instant = clock.now()
        """The server's clock at the start, in whole milliseconds: for stamps and for what is decided before a write."""
        self.settings = settings
        self.topics: set[str] = set()

    def announce(self, topic: str) -> None:
        """News that is told once this has committed."""
        self.topics.add(topic)

    def name_of(self, table: str) -> str:
        """What a collection is called here: for a `$lookup`."""
        return self._tables.name_of(table)

    # -- reading ---------------------------------------------------------------------------------------------------------

    async def find(
        self,
        table: str,
        where: Where,
        *,
        fields: Sequence[str] | None = None,
        sort: Sequence[tuple[str, int]] | None = None,
        limit: int = 0,
        hint: str | None = None,
    ) -> list[Document]:
        """The documents of a filter."""
        projection = None if fields is None else dict.fromkeys(fields, True)
        cursor = self._tables[table].find(
            where,
            projection,
            sort=sort,
            limit=limit,
            hint=hint or _hint(where),
            session=self._session,
            batch_size=limit or 1_000,
        )
        found: list[Document] = await cursor.to_list(None)
        return found

    async def first(
        self,
        table: str,
        where: Where,
        *,
        fields: Sequence[str] | None = None,
        sort: Sequence[tuple[str, int]] | None = None,
    ) -> Document | None:
        """The first document of a filter."""
        projection = None if fields is None else dict.fromkeys(fields, True)
        found: Document | None = await self._tables[table].find_one(where, projection, sort=sort, session=self._session)
        return found

    async def aggregate(self, table: str, pipeline: Sequence[Mapping[str, Any]]) -> list[Document]:
        """The documents that a pipeline gives."""
        cursor = self._tables[table].aggregate(list(pipeline), session=self._session)
        if inspect.isawaitable(cursor):  # Motor gives the cursor at once
            cursor = await cursor
        found: list[Document] = await cursor.to_list(None)
        return found

    async def count(self, table: str, where: Where, *, most: int | None = None) -> int:
        """How many documents a filter has; with `most`, counted no further than that."""
        bound = {} if most is None else {"limit": most}
        found: int = await self._tables[table].count_documents(where, session=self._session, **bound)
        return found

    # -- writing ---------------------------------------------------------------------------------------------------------

    async def insert(self, table: str, documents: Sequence[Document]) -> None:
        """Insert documents. A key that is there raises the driver's error."""
        if len(documents) == 1:
            await self._tables[table].insert_one(documents[0], session=self._session)
        elif documents:
            await self._tables[table].insert_many(documents, session=self._session)

    async def note(self, table: str, document: Document) -> None:
        """Insert a document that a fail-over may lose: nothing is wrong without it."""
        await self._tables.quick(table).insert_one(document, session=self._session)

    async def noted(self, table: str, key: str) -> Document | None:
        """Such a document, also in the moment before the other nodes have it."""
        found: Document | None = await self._tables.quick(table).find_one({"_id": key}, session=self._session)
        return found

    async def wait_for(self, table: str, where: Where) -> None:
        """Wait until no transaction that is under way has written these documents. The server keeps a write outside of one waiting, and
        sends back one inside: so this writes, to a field that nobody reads."""
        await self._tables.quick(table).update_many(where, {"$inc": {"touched": 1}}, hint=_hint(where))

    async def change_one(self, table: str, where: Where, change: Change, *, upsert: bool = False) -> int:
        """Change one document; how many matched (0 or 1, also for an upsert that inserted)."""
        answer = await self._tables[table].update_one(
            where, change, upsert=upsert, hint=None if upsert else _hint(where), session=self._session
        )
        return int(answer.matched_count)

    async def change_many(self, table: str, where: Where, change: Change, *, within: float | None = None) -> int:
        """Change every document of a filter; how many matched. Outside a transaction it may stop half way, also after `within` seconds:
        repeat it."""
        with contextlib.nullcontext() if within is None else pymongo.timeout(within):
            answer = await self._tables[table].update_many(where, change, hint=_hint(where), session=self._session)
        return int(answer.matched_count)

    async def change_each(self, table: str, changes: Sequence[tuple[Where, Change]]) -> int:
        """One document each, together; how many matched in all."""
        if not changes:
            return 0
        writes = [UpdateOne(where, change, hint=_hint(where)) for where, change in changes]
        answer = await self._tables[table].bulk_write(writes, ordered=False, session=self._session)
        return int(answer.matched_count)

    async def change_groups(self, table: str, changes: Sequence[tuple[Where, Change]]) -> int:
        """Every document of each filter, together; how many matched in all. Inside a transaction alone: it is not repeated."""
        if len(changes) == 1:
            return await self.change_many(table, *changes[0])
        if not changes:
            return 0
        writes = [UpdateMany(where, change, hint=_hint(where)) for where, change in changes]
        answer = await self._tables[table].bulk_write(writes, ordered=False, session=self._session)
        return int(answer.matched_count)

    async def remove(self, table: str, where: Where) -> int:
        """Delete every document of a filter; how many there were."""
        answer = await self._tables[table].delete_many(where, hint=_hint(where), session=self._session)
        return int(answer.deleted_count)


Operation: TypeAlias = Callable[[Work], Awaitable[T]]

__all__ = [
    "CODEC",
    "MAJORITY",
    "SETTLED",
    "Change",
    "Document",
    "NativeDatabase",
    "Operation",
    "Tables",
    "Where",
    "Work",
]
