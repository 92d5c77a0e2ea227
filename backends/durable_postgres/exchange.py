"""One round trip on a pooled connection, in the driver's own protocol layer: statements go out together, and their answers are read.

`connection.py` asks through it. The driver's cursors wait for the socket eight times for a transaction that is one round trip, and build
what a user may ask of a cursor; here everything is put into libpq's buffer, sent at once, and waited for once. Which parameters a
statement has is asked of the server when it goes out for the first time in a process: from then on they are written as the server reads
them (`adapting.py`), and a connection prepares the statement once, when it sends it again. Rows are read by the driver, and errors are the
driver's. Nothing here begins, ends or repeats a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import psycopg
from psycopg import errors, pq
from psycopg.adapt import PyFormat, Transformer

from .adapting import REFUSED
from .lending import Lendable, end_wait
from .names import Naming
from .operation import Answer, Ask
from .statements import THERE, Prepared, Statement

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

log = logging.getLogger("durable.postgres")

BINARY: Final = pq.Format.BINARY
COMMIT: Final = b"COMMIT"
SYNC: Final = pq.ExecStatus.PIPELINE_SYNC
ROWS: Final = pq.ExecStatus.TUPLES_OK
FAILED: Final = pq.ExecStatus.FATAL_ERROR
PATIENCE: Final = 5.0
"""Seconds that a statement which is given up may take to end in the server; then its connection is closed."""


class _Written(NamedTuple):
    """A statement and its parameters on the wire."""

    statement: Statement
    values: Sequence[Any]
    types: Sequence[int]
    formats: list[pq.Format]
    ours: bool
    """We wrote them, by the types of the statement: the driver may have other types for other values."""


_Expected: TypeAlias = tuple[Statement | None, Callable[["PGresult"], None] | None]
"""Of which statement a result is, and what is done with it; None: it is an answer."""


class Exchange:
    """The round trips of a store."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._statements: dict[str, Statement] = {}

    async def ask(self, con: Lendable, asks: Sequence[Ask], hints: Sequence[Ask] = ()) -> list[Answer]:
        """Send these together; their answers. The first that fails is raised, the rest is skipped. Hints, behind a commit, may fail."""
        expected: list[_Expected] = []
        results: list[PGresult] = []
        lost: psycopg.Error | None = None
        async with con.lock:
            if con.closed:
                raise psycopg.OperationalError("the connection is closed")
            if con.pgconn.pipeline_status != pq.PipelineStatus.OFF:
                con.pgconn.finish()  # somebody left it in the middle: the answers would be theirs
                raise psycopg.OperationalError("the connection was in use")
            written = [*self._written(con, (*asks, *hints))]
            wanted = 0  # of what did not come to its end only the error is read
            try:
                con.pgconn.enter_pipeline_mode()
                _send(con, written, expected, len(asks))
                await _receive(con, results)
                con.pgconn.exit_pipeline_mode()
                if (came := len(results)) != len(expected):
                    results.clear()  # nobody knows whose they are
                    con.pgconn.finish()
                    raise psycopg.OperationalError(f"{came} answers came for {len(expected)} statements")
                wanted = len(asks)
            except psycopg.Error as error:
                lost = error
            except asyncio.CancelledError:
                await _give_up(con, results)
                raise
            finally:
                answers, failed, committed = _read(con, expected, results, wanted)
                if con.pgconn.pipeline_status != pq.PipelineStatus.OFF:
                    con.pgconn.finish()  # nobody knows what is still to come
        if lost is not None:
            raise failed or lost
        if failed is not None:
            if not committed:
                raise failed
            log.info("a notification was lost, others find the news with their next poll: %s", failed)
        return answers

    def _written(self, con: Lendable, asks: Iterable[Ask]) -> Iterator[_Written]:
        utf8 = con.pgconn.parameter_status(b"client_encoding") == b"UTF8"
        for text, parameters in asks:
            if not utf8:
                yield _by_the_driver(
                    con, Statement(self._naming(text).encode(con.info.encoding), plain=True), parameters
                )
                continue
            statement = self._statements.get(text)
            if statement is None:
                statement = self._statements[text] = Statement(self._naming(text).encode(), plain=not parameters)
            if statement.encoders is None:
                yield _by_the_driver(con, statement, parameters)
                continue
            try:
                values = [
                    None if value is None else encode(value)
                    for encode, value in zip(statement.encoders, parameters, strict=True)
                ]
            except REFUSED:  # the driver says what is wrong with it
                yield _by_the_driver(con, statement, parameters)
            else:
                yield _Written(statement, values, statement.types, statement.formats, True)


def _by_the_driver(con: Lendable, statement: Statement, parameters: Sequence[Any]) -> _Written:
    transformer = Transformer(con)
    values = transformer.dump_sequence(parameters, [PyFormat.AUTO] * len(parameters))
    return _Written(statement, values, transformer.types or (), transformer.formats or [], ours=False)


def _send(con: Lendable, written: Sequence[_Written], expected: list[_Expected], asked: int) -> None:
    """Put all of it into the buffer, and note what will come back."""
    pgconn, prepared = con.pgconn, con.prepared
    prepare = con.prepare_threshold is not None
    for place, (statement, values, types, formats, ours) in enumerate(written):
        if place == asked:
            _look_after(pgconn, prepared, expected)
        name = prepared.names.get(statement) if ours and prepared.certain else None
        if name is not None:
            prepared.names[statement] = prepared.names.pop(statement)
        elif not statement.known:
            pgconn.send_prepare(b"", statement.text)
            pgconn.send_describe_prepared(b"")
            expected += ((statement, _nothing), (statement, statement.learn))
            prepared.seen.add(statement)
        elif ours and prepare and prepared.certain:
            if statement in prepared.seen:
                name = prepared.new_name()
                pgconn.send_prepare(name, statement.text, types)
                expected.append((statement, functools.partial(prepared.add, statement, name)))
            prepared.seen.add(statement)
        if name is not None:
            pgconn.send_query_prepared(name, values, formats, BINARY)
        else:
            pgconn.send_query_params(statement.text, values, types, formats, BINARY)
        expected.append((statement, None))
    if len(written) == asked:
        _look_after(pgconn, prepared, expected)
    pgconn.pipeline_sync()


def _look_after(pgconn: PGconn, prepared: Prepared, expected: list[_Expected]) -> None:
    """Let go of what is too much; or look what is there, if that is in doubt."""
    if not prepared.certain:
        pgconn.send_query_params(THERE, None, result_format=BINARY)
        expected.append((None, prepared.see))
        return
    for name in prepared.closing:
        pgconn.send_query_params(b"DEALLOCATE " + name, None)
        expected.append((None, functools.partial(prepared.closed, name)))


def _nothing(_: PGresult) -> None:
    """Nothing is done with it."""


async def _receive(con: Lendable, results: list[PGresult]) -> None:
    """Send what is in the buffer and read what comes back, each as it becomes possible: neither side waits for the other one to read."""
    pgconn = con.pgconn
    unsent = pgconn.flush() != 0
    while True:
        await _ready(con, unsent)
        pgconn.consume_input()
        unsent = unsent and pgconn.flush() != 0
        ended = False
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                if ended:  # no command is left: there will be no end of them
                    raise psycopg.OperationalError("the connection was lost")
                ended = True
            elif result.status == SYNC:
                return
            else:
                ended = False
                results.append(result)


async def _ready(con: Lendable, to_write: bool) -> None:
    """Wait until there is something to read, or room to write. What is done then may close the socket: the loop has let go of it."""
    loop, socket = asyncio.get_running_loop(), con.pgconn.socket
    ready = loop.create_future()
    loop.add_reader(socket, end_wait, ready)
    con.waiting = ready
    try:
        if to_write:
            loop.add_writer(socket, end_wait, ready)
        await ready
    finally:
        con.waiting = None
        loop.remove_reader(socket)
        if to_write:
            loop.remove_writer(socket)


async def _give_up(con: Lendable, results: list[PGresult]) -> None:
    """Ask the server to stop, and read what it says. Where it does not in time, the connection stays in the middle of it."""
    with contextlib.suppress(Exception, asyncio.CancelledError):
        await con.cancel_safe(timeout=PATIENCE)
        async with asyncio.timeout(PATIENCE):
            await _receive(con, results)
        con.pgconn.exit_pipeline_mode()


def _read(
    con: Lendable, expected: Sequence[_Expected], results: Sequence[PGresult], asked: int
) -> tuple[list[Answer], psycopg.Error | None, bool]:
    """The answers; what failed; and whether the last that was asked for is a commit that is made."""
    transformer = Transformer(con)
    answers: list[Answer] = []
    committed = False
    for (statement, act), result in zip(expected, results, strict=False):
        status = result.status
        if status == FAILED:
            error = errors.error_from_result(result, "utf-8" if con.closed else con.info.encoding)
            con.prepared.doubt(statement, error.sqlstate)
            return answers, error, committed
        if act is not None:
            act(result)
        elif len(answers) == asked:
            continue  # of a hint
        elif status == ROWS:
            transformer.set_pgresult(result)
            rows = transformer.load_rows(0, result.ntuples, tuple)
            answers.append(Answer(rows, len(rows)))
        else:
            if statement is not None and statement.text == COMMIT:
                if result.command_status != COMMIT:
                    return answers, errors.InFailedSqlTransaction("it had failed before, and is rolled back"), False
                committed = len(answers) + 1 == asked
            touched = result.command_tuples
            answers.append(Answer([], -1 if touched is None else touched))
    return answers, None, committed


__all__ = ["Exchange"]
