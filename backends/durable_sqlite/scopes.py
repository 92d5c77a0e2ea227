"""Scopes and keys from what is stored: may a call see this row, and how is a key of this tenant stored. For operations
that have a row's `tenant_id` in hand; those that select by scope use `rows.of_scope`. Nothing here reads a table.
"""

from __future__ import annotations

from durable.model import Scope

from .rows import of_scope


def sees(scope: Scope, tenant_id: str | None) -> bool:
    """May a call of this scope touch rows of this stored tenant (57, 59)?"""
    everybody, bound = of_scope(scope)
    return everybody or bound == tenant_id


def stored(tenant_id: str | None, key: str) -> str:
    """A key in its stored form, from a tenant as it is stored (34)."""
    return f"{tenant_id or ''}:{key}"
