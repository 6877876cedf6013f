"""Parameters that clients know and that do nothing here: which are refused, and which are let pass.

A parameter that would change the answer is refused unless its value is the default; one that changes nothing about it
is let pass; a name that nobody knows is ignored, with a warning in the log.
"""

import logging
from collections.abc import Collection, Mapping

from quire.core.checks import shown
from quire.server.errors import unsupported

log = logging.getLogger(__name__)

# Not supported yet, with the values besides null that change nothing. A route may still have one as a field of its own.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "echo": (False,),
    "function_call": ("none", "auto"),         # without functions
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),           # without tools
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "chat_template": (),
    "documents": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "stream_options.continuous_usage_stats": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
}

# They tell the server who asks, what it may keep, and how to pad what it sends. They change no answer.
WITHOUT_EFFECT = frozenset((
    "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "stream_options.include_obfuscation", "user",
))

_MAX_NAMES_LOGGED = 8


def check_names(given: Mapping[str, object], fields: Collection[str], within: str = "") -> None:
    """Look at the names that are no fields of a body: ApiError 400 for one that is not supported, with its value.

    `within` is what stands before the names, of the object's own place in the body: "stream_options.".
    """
    others = {within + name: value for name, value in given.items() if name not in fields}
    for name, value in others.items():
        if name in UNSUPPORTED and not _changes_nothing(value, UNSUPPORTED[name]):
            unsupported(name, value)
    unknown = [name for name in others if name not in UNSUPPORTED and name not in WITHOUT_EFFECT]
    if unknown:
        names = ", ".join(shown(name) for name in unknown[:_MAX_NAMES_LOGGED])
        log.warning("%d unknown fields of a request are ignored: %s", len(unknown), names)


def _changes_nothing(value: object, defaults: tuple[object, ...]) -> bool:
    return value is None or any(type(value) is type(default) and value == default for default in defaults)
