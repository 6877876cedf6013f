"""API keys: which key a request carries, and which client it counts for."""

import base64
import binascii
import hashlib
import hmac

from starlette.types import Scope

from quire.core.owner_labels import OPERATOR
from quire.server.options import ServerOptions

# Keys of a scope, which the application sets.
KEY_NUMBER = "quire.key_number"  # number of the key that a request carries, from 1, or OPERATOR; 0 without keys
CLIENT_ID = "quire.client_id"    # see `client_id_of`


class ApiKeys:
    """The keys of a server, as digests."""

    def __init__(self, options: ServerOptions) -> None:
        self._keys = [(number, _digest(key.encode())) for number, key in enumerate(options.api_key, 1)]
        if options.operator_api_key is not None:
            self._keys.append((OPERATOR, _digest(options.operator_api_key.encode())))

    def number_of(self, scope: Scope, *, allows_basic: bool) -> int:
        """Return the number of the key in the Authorization or X-API-Key header, from 1, or OPERATOR; 0 for none.

        Takes the same time whichever key matches, or nearly matches. A header that is sent twice counts as none.
        """
        scheme, _, key = _only(scope, b"authorization").partition(b" ")
        is_basic = allows_basic and scheme.lower() == b"basic"
        bearer = self._number_of(_password(key.strip()) if is_basic else key.strip())
        plain = self._number_of(_only(scope, b"x-api-key").strip())
        return (bearer if is_basic or scheme.lower() == b"bearer" else 0) or plain

    def _number_of(self, key: bytes) -> int:
        digest = _digest(key)
        matches = [number for number, known in self._keys if hmac.compare_digest(digest, known)]
        return matches[0] if matches else 0


def _only(scope: Scope, name: bytes) -> bytes:
    """Return the value of a header that is sent once; else an empty one, which is no key."""
    sent = [value for each, value in scope["headers"] if each == name]
    return sent[0] if len(sent) == 1 else b""


def client_id_of(scope: Scope) -> str:
    """Return the client that a request counts for: its API key, or its connection without one."""
    if number := scope[KEY_NUMBER]:
        return "operator" if number == OPERATOR else f"key:{number}"
    host, port = scope.get("client") or ("", 0)     # none where the connection is a local socket
    return f"connection:{host}:{port}"


def _password(credentials: bytes) -> bytes:
    """Return the password of HTTP Basic credentials: base64 of user:password."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
