"""A scope as the two parameters of a condition, and stored keys from stored tenants. Operations with a scope use it.

`SCOPED` stands in a statement where the rows of other tenants must not be seen; `values` gives its two parameters. A None tenant
is the untagged rows and nothing else (semantics 59): `IS`, never `=` and never a condition left out.
"""

from __future__ import annotations

from typing import Final

from durable.model import ALL, Scope
from durable.storekit import tenant_text

SCOPED: Final = "(? OR tenant_id IS ?)"


def values(scope: Scope) -> tuple[bool, str | None]:
    """The parameters of SCOPED."""
    return (True, None) if scope is ALL else (False, tenant_text(scope))


def sees(scope: Scope, tenant_id: str | None) -> bool:
    """May a call of this scope touch rows of this stored tenant?"""
    everybody, bound = values(scope)
    return everybody or bound == tenant_id


def stored(tenant_id: str | None, key: str) -> str:
    """A key in its stored form, from a tenant as it is stored (34)."""
    return f"{tenant_id or ''}:{key}"
