"""The pool's account as files keep it, from a snapshot of the books."""

from __future__ import annotations

from kvledger.books.account_names import AccountNames
from kvledger.books.lines import AccountTime, PoolAccount
from kvledger.books.snapshot import Account, Snapshot


def pool_account(books: Snapshot, names: AccountNames) -> PoolAccount:
    """Block-nanoseconds by state and by name, of one moment.

    Accounts of one name are one: a tenant and who had its name before, a group and what it was
    with other members.
    """
    found: dict[tuple[str, bool], AccountTime] = {}
    for account in books.accounts():
        name, is_scope = _name(account, names), account.is_shared_scope
        had = found.get((name, is_scope), AccountTime(name, is_scope, 0, 0, 0))
        found[name, is_scope] = AccountTime(
            name,
            is_scope,
            had.held + account.held.time,
            had.reserved + account.reserved.time,
            had.cached + account.cached.time,
        )
    states = {state: balance.time for state, balance in books.states.items()}
    return PoolAccount(books.elapsed, states, tuple(found.values()))


def _name(account: Account, names: AccountNames) -> str:
    if not account.is_shared_scope:
        return names.of_tenant(account.number)
    owner = names.of_scope(account.number)
    return "(unknown)" if owner is None else owner.name
