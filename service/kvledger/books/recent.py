"""Requests that have ended, as long as they may still be asked about."""

from __future__ import annotations

from collections import OrderedDict

from kvledger.books.lines import EndedRequest

# How many are kept: some kilobytes each thousand, and minutes of a busy server.
RECENT = 20_000


class RecentRequests:
    """The last requests with a receipt, by id. Belongs to the event loop's thread."""

    def __init__(self, most: int = RECENT) -> None:
        self._most = most
        self._ended: OrderedDict[str, EndedRequest] = OrderedDict()

    def note(self, ended: EndedRequest) -> None:
        """Keeps one, and lets the oldest go if there are too many."""
        if ended.receipt is None:
            return
        self._ended[ended.request_id] = ended
        if len(self._ended) > self._most:
            self._ended.popitem(last=False)

    def find(self, request_id: str, tenant: int | None = None) -> EndedRequest | None:
        """The request, if it is kept, and the tenant's of this number unless that is None."""
        ended = self._ended.get(request_id)
        if ended is None or (tenant is not None and ended.tenant_number != tenant):
            return None
        return ended
