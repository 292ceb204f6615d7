"""A queue that several tenants share, and that none of them can fill for the others."""

from __future__ import annotations


def has_room(queued: int, own: int, most: int, tenants: int) -> bool:
    """Whether one more request of a tenant may enter a queue of `most` places.

    `queued` requests are in it, `own` of them the tenant's; `tenants` have requests in it, this one
    counted in any case. While there is room everybody may enter, and the first request of a tenant
    always may. In a full queue a tenant may besides go on to its share, most / tenants, as long as
    the queue has less than one request more for each tenant. Who has more than its share enters
    again when the queue is no longer full.

    So the queue never has more than most + tenants requests.
    """
    if queued < most or own == 0:
        return True
    return own < most // tenants and queued < most + tenants
