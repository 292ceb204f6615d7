"""The pool's account as the files of --books state it, from a snapshot of the core's books."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from kvledger.books.account_names import AccountNames
from kvledger.books.lines import AccountTime, PoolAccount
from kvledger.books.snapshot import Account, Snapshot

# Accounts of one kind in a line. Those that held least are one beyond that: a line comes every few
# seconds, and there may be many thousands.
_ACCOUNTS_MAX = 1000
_OTHERS = "(others)"
_UNKNOWN = "(unknown)"


def pool_account(snapshot: Snapshot, names: AccountNames) -> PoolAccount:
    """Block-time of a snapshot by state, by tenant and by shared scope.

    Accounts of one name are one: a tenant that was removed and came again, a group's generations.
    """
    tenants: dict[str, AccountTime] = {}
    scopes: dict[str, AccountTime] = {}
    for account in snapshot.accounts():
        if account.is_shared_scope:
            owner = names.of_scope(account.number)
            _add(scopes, _UNKNOWN if owner is None else owner.name, True, account)
        else:
            _add(tenants, names.of_tenant(account.number), False, account)
    return PoolAccount(
        snapshot.elapsed,
        {state: balance.time for state, balance in snapshot.states.items()},
        [*_bounded(tenants.values()), *_bounded(scopes.values())],
    )


def _add(sums: dict[str, AccountTime], name: str, is_scope: bool, account: Account) -> None:
    times = (account.held.time, account.reserved.time, account.cached.time)
    if any(times):
        had = sums.get(name)
        more = AccountTime(name, is_scope, *times)
        sums[name] = more if had is None else _sum(name, (had, more))


def _bounded(accounts: Iterable[AccountTime]) -> list[AccountTime]:
    listed = list(accounts)
    if len(listed) <= _ACCOUNTS_MAX:
        return listed
    most = heapq.nlargest(_ACCOUNTS_MAX - 1, listed, key=lambda each: (each.held, each.name))
    kept = {each.name for each in most}
    return [*most, _sum(_OTHERS, [each for each in listed if each.name not in kept])]


def _sum(name: str, accounts: Iterable[AccountTime]) -> AccountTime:
    listed = list(accounts)
    return AccountTime(
        name,
        listed[0].is_scope,
        sum(each.held for each in listed),
        sum(each.reserved for each in listed),
        sum(each.cached for each in listed),
    )
