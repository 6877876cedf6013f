"""Right to a priority: below 0, before all other requests, it has to be granted."""

from quire.core.owner_labels import OPERATOR
from quire.server.errors import invalid
from quire.server.service import Service


def check_priority_granted(service: Service, priority: int, key_number: int) -> None:
    """Raise ApiError 400 for a priority below 0 without the right to it."""
    if priority < 0 and key_number != OPERATOR and not service.options.allow_client_priority:
        message = (
            f"priority must be 0 or more, got {priority}: below 0 it needs the operator's key (operator_api_key), or a "
            f"server that grants it to all clients (allow_client_priority)"
        )
        invalid(message, param="priority", code="unsupported_parameter")
