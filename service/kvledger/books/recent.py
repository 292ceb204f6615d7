"""Requests that have ended, as long as they may still be asked about."""

from __future__ import annotations

from collections import OrderedDict

from kvledger.books.lines import EndedRequest

# How many are kept of one tenant: so many that others' requests do not decide how long.
OF_A_TENANT = 1000
# And of all, some 30 MB; beyond that the tenant with most loses its oldest.
IN_ALL = 20_000


class RecentRequests:
    """The last requests with a receipt, by tenant. Belongs to the event loop's thread."""

    def __init__(self, of_a_tenant: int = OF_A_TENANT, in_all: int = IN_ALL) -> None:
        self._of_a_tenant = of_a_tenant
        self._in_all = in_all
        self._count = 0
        self._tenants: dict[int, OrderedDict[str, EndedRequest]] = {}
        self._owners: dict[str, int] = {}

    def note(self, ended: EndedRequest) -> None:
        """Keeps one, and lets the oldest of a tenant go if there are too many."""
        if ended.receipt is None:
            return
        number = ended.tenant_number
        own = self._tenants.setdefault(number, OrderedDict())
        own[ended.request_id] = ended
        self._owners[ended.request_id] = number
        self._count += 1
        if len(own) > self._of_a_tenant:
            self._drop(number)
        elif self._count > self._in_all:
            largest = max(self._tenants, key=lambda each: len(self._tenants[each]))
            # Several at once, so that the largest need not be looked for each time.
            for _ in range(min(len(self._tenants[largest]), max(1, self._in_all // 100))):
                self._drop(largest)

    def find(self, request_id: str, tenant: int | None = None) -> EndedRequest | None:
        """The request, if it is kept, and the tenant's of this number unless that is None."""
        number = self._owners.get(request_id)
        if number is None or (tenant is not None and number != tenant):
            return None
        return self._tenants[number][request_id]

    def _drop(self, number: int) -> None:
        own = self._tenants[number]
        request_id, _ = own.popitem(last=False)
        del self._owners[request_id]
        self._count -= 1
        if not own:
            del self._tenants[number]
