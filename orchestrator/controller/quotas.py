"""What each user's sweeps may hold at once on a cluster: one object, which clients write and the controller obeys.

It bounds what starts: nothing that runs is ended for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from orchestrator.errors import ControllerError, NotFoundError
from orchestrator.security.json_text import parse_json
from orchestrator.state.budgets import Cap
from orchestrator.state.codec import decode_value
from orchestrator.state.scheduler import ANYBODY
from orchestrator.storage.layout import quotas_name
from orchestrator.storage.protocol import ObjectStore

__all__ = ["ANYBODY", "Cap", "read_quotas", "write_quotas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quotas:
    """Content of ``quotas.json``."""

    users: Mapping[str, Cap] = field(default_factory=dict)


def write_quotas(store: ObjectStore, cluster: str, users: Mapping[str, Cap]) -> None:
    """Bound what users hold at once, in place of all earlier bounds; ``*`` are those who have none of their own.

    Works while no controller runs.

    Raises:
        ControllerError: a bound is negative.
    """
    for user, cap in users.items():
        if (cap.max_gpus or 0) < 0 or (cap.max_concurrent or 0) < 0:
            message = f"the quota of {user} is {cap}: bounds are 0 or more, or left out"
            raise ControllerError(message)
    store.put(quotas_name(cluster), json.dumps(asdict(_Quotas(users=users))).encode())


def read_quotas(store: ObjectStore, cluster: str) -> Mapping[str, Cap]:
    """Bounds by user; empty without any.

    Raises:
        ControllerError: the object is of a newer version, or damaged.
    """
    try:
        content = store.get(quotas_name(cluster))
    except NotFoundError:
        return {}
    try:
        return _checked(decode_value(_Quotas, parse_json(content)).users)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        message = (
            f"{quotas_name(cluster)} in {store.uri} cannot be read ({error!r}); the bounds that were read before hold, "
            "write it anew"
        )
        raise ControllerError(message) from error


def _checked(users: Mapping[str, Cap]) -> Mapping[str, Cap]:
    """The same. Raises ``TypeError`` for a bound that is no number, which every round of decisions would trip over."""
    for user, cap in users.items():
        for bound in (cap.max_gpus, cap.max_concurrent):
            if bound is not None and not isinstance(bound, int | float):
                raise TypeError(f"a bound of {user} is {bound!r}")
    return users
