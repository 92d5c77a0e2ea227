"""How the command line speaks: tables on a terminal, JSON otherwise or with `--json`. Every command prints through here.

Text that comes from the database is printed as text: control characters are shown, never sent to the terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def plain(value: object) -> str:
    """One line of printable text of any value."""
    if value is None:
        return "–"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Output:
    """Where a command prints. `json_wanted` is the flag; a stdout that is no terminal means JSON too."""

    def __init__(self, *, json_wanted: bool) -> None:
        self.machine = json_wanted or not sys.stdout.isatty()
        self._console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())

    def data(self, value: Any) -> None:
        """Print a value as one line of JSON."""
        sys.stdout.write(json.dumps(value, ensure_ascii=False, default=_jsonable) + "\n")

    def say(self, text: str, *, style: str = "") -> None:
        """Print a line for people; nothing for machines."""
        if not self.machine:
            self._console.print(Text(text, style=style))

    def table(self, title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
        """Print rows: a table on a terminal, without the columns that no row fills; a line of JSON per row otherwise."""
        if self.machine:
            for row in rows:
                self.data(row)
            return
        table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
        shown = [column for column in columns if not rows or any(row.get(column) is not None for row in rows)]
        for column in shown:
            # An id is there to be copied: it stays on one line, whatever the others have to do for it.
            table.add_column(column.replace("_", " "), overflow="fold", no_wrap=column == "id")
        for row in rows:
            table.add_row(*(Text(plain(row.get(column))) for column in shown))
        self._console.print(table)
        if not rows:
            self._console.print(Text("none", style="dim"))

    def fields(self, title: str, row: Mapping[str, Any]) -> None:
        """Print one thing: name and value per line on a terminal, one line of JSON otherwise."""
        if self.machine:
            self.data(row)
            return
        table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
        for name, value in row.items():
            if value not in (None, "", {}, []):
                table.add_row(Text(name.replace("_", " "), style="bold"), Text(plain(value)))
        self._console.print(table)


def complain(text: str) -> None:
    """Print an error for people, to stderr."""
    Console(stderr=True, highlight=False).print(Text(text, style="red"))


def _jsonable(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
