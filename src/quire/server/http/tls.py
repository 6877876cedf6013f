"""TLS context of a server: its certificate, and what it asks of the certificates of clients."""

import ssl

from quire.core.errors import ConfigError
from quire.server.options import ServerOptions


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Return the context that connections are encrypted with, or None. ConfigError for files that are none of it."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=_refuse_password)
    except OSError as error:  # ssl.SSLError is one
        key = "" if options.ssl_keyfile is None else f" with ssl_keyfile {options.ssl_keyfile!r}"
        raise ConfigError(f"ssl_certfile {options.ssl_certfile!r}{key} cannot be used: {error}") from error
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"ssl_ca_certs {options.ssl_ca_certs!r} cannot be used: {error}") from error
    context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    if options.ssl_ciphers is not None:
        try:
            context.set_ciphers(options.ssl_ciphers)
        except ssl.SSLError as error:
            raise ConfigError(f"ssl_ciphers {options.ssl_ciphers!r} names no cipher that there is") from error
    return context


def _refuse_password() -> str:
    """Raise ConfigError: OpenSSL would ask on the terminal."""
    raise ConfigError("ssl_keyfile must not be encrypted: a server cannot ask for the password")
