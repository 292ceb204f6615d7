"""How long an output token should take at most, for the server, a tenant or a request.

While somebody decodes, steps take no more of others' prompts than keeps them within the target of
whoever has the shortest (core/scheduler_prefill.cc). So a target costs others their prompts' time:
only an operator sets one, and a request may ask for a longer one than it would have, never for a
shorter.
"""

from __future__ import annotations

from kvledger.errors import FieldViolation, InvalidRequest
from kvledger.tenants.tenant import TenantLimits

_FIELD = "tpot_target"


def step_time_max(server: float | None, limits: TenantLimits, asked: float | None) -> int:
    """Nanoseconds of the longest step while a request decodes; 0 is the server's own target.

    `server` and `asked` are seconds, None where nothing is set. Raises InvalidRequest for a target
    that a request may not ask for.
    """
    least = limits.tpot_target if limits.tpot_target is not None else server
    if asked is not None:
        if least is None:
            raise InvalidRequest(
                FieldViolation(
                    _FIELD,
                    "neither this tenant nor this server has a target, and a request can only ask "
                    "for a longer one; leave it out",
                )
            )
        if asked < least:
            raise InvalidRequest(
                FieldViolation(
                    _FIELD,
                    f"{asked:g} s is shorter than the target that this request has, {least:g} s; "
                    f"ask for a longer one, or leave it out",
                )
            )
        return round(asked * 1e9)
    return 0 if limits.tpot_target is None else round(limits.tpot_target * 1e9)
