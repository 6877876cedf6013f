"""Errors, as types: each is turned into an exit code or an HTTP status in one place.

Everything under `EngineError` is an answer to something outside the engine (a bad request, a bad setting, a bad
model folder, not enough memory). Faults of the engine itself are assertions, not these.
"""


class EngineError(Exception):
    """Base of every error that Quire raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting that cannot work. The text names the setting, its value and the nearest value that works."""


class NotInstalledError(ConfigError):
    """A setting needs an optional package, or the compiled kernels. The text has the command that installs them."""


class ModelError(EngineError, ValueError):
    """A model folder that cannot be loaded: missing, broken, hostile or of an unknown architecture."""


class InvalidRequestError(EngineError, ValueError):
    """A request that cannot be served as asked. Nothing was queued and nothing else is disturbed.

    `param` names the field, `code` is the contract's machine-readable reason, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """The prompt and the tokens asked for do not fit into the model's length or the KV cache.

    `excess`: the tokens of a prompt that is too long by itself, at least, and the most that fit.
    """

    def __init__(
        self, message: str, *, param: str | None = "prompt", excess: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.excess = excess


class RequestFailedError(EngineError):
    """A fault, ours or the model's, has ended this request. Nothing else is disturbed."""


class DeadlineExceededError(EngineError):
    """The deadline of a request has passed before its first token. It holds nothing any more.

    `param` names the field of the deadline.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownPrefixError(InvalidRequestError):
    """No pinned prefix has this id (any more)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="id", code="prefix_not_found")


class SessionError(InvalidRequestError):
    """A session, or a saved one, that cannot be used. `code`: one of SESSION_STATUS."""

    def __init__(self, message: str, code: str, *, param: str = "session_id") -> None:
        super().__init__(message, param=param, code=code)


SESSION_STATUS = {   # HTTP's, for each code of a SessionError
    "session_not_found": 404,
    "session_incompatible": 409,    # saved by another model, with another salt or by other arithmetic
    "session_unreadable": 409,      # its files are spoilt
    "session_not_saved": 507,       # the disk is full, or cannot be written
    "session_gone": 410,            # unpinned while it was used
    "answer_gone": 410,             # the answer that it was to be made of
    "session_limit": 400,
    "invalid_session": 400,
}


class EngineAsleepError(EngineError):
    """The engine sleeps: its memory is freed until it is woken."""

    def __init__(self) -> None:
        super().__init__("the engine sleeps: its memory is freed until it is woken (wake_up)")


class RankLostError(EngineError):
    """A rank of tensor parallelism has ended or does not answer: the engine cannot go on."""


# Errors that a user can mend, by the names under which processes tell each other: the first is one of the second.
USER_ERRORS: dict[str, type[EngineError]] = {
    error.__name__: error for error in (NotInstalledError, ConfigError, ModelError)
}


def error_of(kind: str, text: str, fault: type[EngineError]) -> EngineError:
    """Return the error that another process names; one of type `fault` if no user can mend it."""
    return USER_ERRORS.get(kind, fault)(text)
