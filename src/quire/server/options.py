"""Every setting of the HTTP server under its public name, checked before anything is loaded.

`Limits` bound whatever a client multiplies. A request past a bound is refused before any work is done for it, by the
status that the option states.
"""

import ipaddress
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from quire.core.errors import ConfigError
from quire.core.image_processing import MAX_IMAGE_PIXELS, PILLOWS_PIXELS
from quire.core.logs import Form, Level
from quire.core.optional_package import needs_library
from quire.core.options import (
    SIZE,
    check_options,
    declared_options,
    option,
    parse_bytes,
    parse_json_object,
    same_option,
)
from quire.core.owner_labels import MAX_LABELS
from quire.core.pooling import MAX_PINNED_PREFIXES
from quire.core.structured_outputs import StructuredOutputsConfig, parse_config
from quire.engine.options import EngineOptions
from quire.engine.options.parallel_options import START_TIMEOUT_S
from quire.server.adapter_names import AdapterModule, parse_modules

_LONGEST_S = 86400.0
_HOST_NAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")  # no address
_MAX_KEYS = 1 << 16     # with a weight
_REFUSED = {"past": "400"}
_OVERLOADED = {"past": "429 `server_overloaded`"}
_HEAD_TOO_LARGE = {"past": "431 `headers_too_large`"}

_server = partial(option, panel="Server")
_access = partial(option, panel="Access")
_outputs = partial(option, panel="Outputs")
_recovery = partial(option, panel="Recovery")
_time = partial(option, panel="Limits", low=0, is_low_excluded=True, high=_LONGEST_S, unit="seconds")
_count = partial(option, panel="Limits", low=1)
_size = partial(option, panel="Limits", low=1, metavar=SIZE)
_share = partial(option, panel="Limits", low=0, is_low_excluded=True, high=1)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes, counts, shares, and times in seconds. Sizes (`_bytes`) may be given as text such as "4MiB"."""

    max_queued_requests: int = _count(
        1024, "prompts that may wait; more are answered with 429",
        row="prompts that wait; while none waits, as many more as there are free rows in a step",
        past="429 `server_overloaded`; 400 for a call of more prompts than this and `--max-num-seqs` together",
    )  # fmt: skip
    max_queued_tokens: int = _count(
        8 << 20, "prompt tokens x n of requests and pins that wait; more: 429",
        row="prompt tokens x n of all requests that wait, pins included: 131,072 tokens with n = 64, or 8,192 tokens "
        "for each of 1,024 requests",
        past="429 `server_overloaded`; 400 for a call that has more by itself",
    )  # fmt: skip
    max_connections: int = _count(
        16384, "open connections; less where the system grants fewer files",
        row="open connections; less where the system grants fewer files. Refused ones do not count: at most 64 of them "
        "stay open for up to 2 s, until their clients have the answer",
        **_OVERLOADED,
    )  # fmt: skip
    max_pipelined_requests: int = _count(
        16, "requests that wait on one connection for the answer before theirs",
        row="requests that wait on one connection for the answer before theirs, of the last one's body 64 KiB",
        past="400 (body: 413) behind their answers, closed",
    )  # fmt: skip
    max_url_bytes: int = _size(8 << 10, "longest URL", row="the URL", **_HEAD_TOO_LARGE)
    max_headers: int = _count(100, "headers of a request", **_HEAD_TOO_LARGE)
    max_header_bytes: int = _size(32 << 10, "names and values of all headers of a request", **_HEAD_TOO_LARGE)
    max_body_bytes: int = _size(4 << 20, "longest body of a request", past="413 `request_too_large`")
    max_total_body_bytes: int = _size(
        64 << 20, "bodies of all requests until their prompts are tokenized",
        row="the bodies of all requests together, from their first byte until their prompts are tokenized; at least 4 "
        "times `--max-body-bytes`",
        past="429 `server_overloaded`, see below",
    )  # fmt: skip
    max_json_depth: int = _count(
        64, "lists and objects inside of each other in a body",
        row="lists and objects inside of each other, the body itself counted", past="400 `invalid_json`",
    )  # fmt: skip
    max_json_values: int = _count(
        32768, "strings, lists and objects in a body",
        row="strings (names too), lists and objects in a body; numbers are not counted", **_REFUSED,
    )  # fmt: skip
    max_buffered_bytes: int = _size(
        64 << 10, "of an answer that a connection holds for a slow reader",
        row="what a connection holds for a slow reader, besides the piece that is being sent", past="see below",
    )  # fmt: skip
    receive_timeout: float = _time(
        30.0, "seconds for the head of a request, and for its body", past="408 `request_timeout`, closed"
    )
    send_timeout: float = _time(
        30.0, "seconds in which a reader takes something of what waits for it",
        row="seconds in which a slow reader has to take as much as is held for it", past="closed, the request ended",
    )  # fmt: skip
    idle_timeout: float = _time(
        75.0, "seconds that a connection is kept without a request", row="seconds of a connection without a request",
        past="closed",
    )  # fmt: skip
    max_n: int = _count(64, "highest n and beam width of a request", row="`n`, and the beam width", **_REFUSED)
    max_choices: int = _count(
        2048, "answers of one call: prompts times n", row="prompts of a call times `n`", **_REFUSED
    )
    max_call_tokens: int = _count(1 << 20, "tokens of all prompts of a call", **_REFUSED)
    max_prompt_candidates: int = _count(
        1 << 18, "prompt logprobs of a call, over all positions and answers",
        row="prompt logprobs of a call: tokens times (`prompt_logprobs` + 1, and the longest list of "
        "`prompt_logprob_token_ids`) times `n`",
        **_REFUSED,
    )  # fmt: skip
    max_output_candidates: int = _count(
        1 << 22, "logprobs of a call's answers: n x max_tokens x (logprobs + 1)",
        row="logprobs of a call's answers: prompts times `n` times `max_tokens` (or what fits) times (`logprobs` + 1)",
        **_REFUSED,
    )  # fmt: skip
    max_logprob_bytes: int = _size(
        512 << 20, "reserved for logprobs of all calls under way, 16 bytes each",
        row="memory reserved for the logprobs of all calls under way, 16 bytes for each that a call may come to, "
        "prompts' included, until its answer is written",
        past="429 `server_overloaded`; 400 for a call that needs more by itself",
    )  # fmt: skip
    max_history_bytes: int = _size(
        64 << 20, "of the calls that /v1/requests/{id}/explain knows",
        row="memory of the calls that `explain` knows, objects included", past="the oldest are forgotten",
    )  # fmt: skip
    max_messages: int = _count(4096, "messages of a conversation, or items of an input", **_REFUSED)
    max_conversation_bytes: int = _size(
        4 << 20, "messages of a conversation and the variables of its template",
        row="messages of a conversation and the variables of its template, as msgpack", **_REFUSED,
    )  # fmt: skip
    max_images: int = option(
        8, "images of a request; 0: none", panel="Limits", low=0, row="images of a request; 0: none", **_REFUSED
    )
    max_image_bytes: int = _size(
        8 << 20, "file of an image, decoded from base64",
        row="the file of an image, decoded from base64; the base64 counts for `--max-body-bytes`", **_REFUSED,
    )  # fmt: skip
    max_image_pixels: int = _count(
        MAX_IMAGE_PIXELS, "pixels of an image", high=PILLOWS_PIXELS,
        row="pixels of an image, by the header of its file: it is not decoded past them",
        **_REFUSED,
    )  # fmt: skip
    max_decoded_image_bytes: int = _size(
        256 << 20, "decoded images of a request, 4 bytes a pixel",
        row="decoded images of a request together, 4 bytes for each pixel of their files", **_REFUSED,
    )  # fmt: skip
    max_total_image_bytes: int = _size(
        512 << 20, "images of all requests under way, as the model gets them",
        row="images of all requests under way, 3 bytes for each pixel that the model gets; one client (key, or "
        "connection without keys) holds at most half",
        past="429 `server_overloaded`; 400 for a request that needs more by itself",
    )  # fmt: skip
    max_template_variable_bytes: int = _size(
        64 << 10, "variables of a chat template (chat_template_kwargs)", row="`chat_template_kwargs`, as msgpack",
        **_REFUSED,
    )  # fmt: skip
    max_tools: int = _count(128, "tools of a request", row="`tools`", **_REFUSED)
    max_tool_bytes: int = _size(512 << 10, "tools of a request", row="`tools`, as msgpack", **_REFUSED)
    max_schema_bytes: int = _size(128 << 10, "longest JSON schema", row="each JSON schema, without blanks", **_REFUSED)
    max_schema_depth: int = _count(
        32, "lists and objects inside of each other in a JSON schema", **_REFUSED
    )
    max_schema_properties: int = _count(1024, "properties of a JSON schema, in all of its objects", **_REFUSED)
    max_argument_bytes: int = _size(
        1 << 20, "arguments of a tool call in a message", row="the arguments of each tool call in `messages`",
        **_REFUSED,
    )  # fmt: skip
    max_stop_strings: int = _count(64, "stop strings of a request", row="`stop`", **_REFUSED)
    max_stop_chars: int = _count(
        1024, "longest stop string or bad word, in characters", row="characters of a stop string, and of a bad word",
        **_REFUSED,
    )  # fmt: skip
    max_bad_words: int = _count(64, "bad words of a request", row="`bad_words`", **_REFUSED)
    max_stop_token_ids: int = _count(1024, "stop tokens of a request", row="`stop_token_ids`", **_REFUSED)
    max_allowed_token_ids: int = _count(4096, "allowed tokens of a request", row="`allowed_token_ids`", **_REFUSED)
    max_logit_bias: int = _count(4096, "entries of logit_bias", row="entries of `logit_bias`", **_REFUSED)
    max_grammar_bytes: int = _size(128 << 10, "longest grammar of an output", row="a `grammar`", **_REFUSED)
    max_regex_bytes: int = _size(8 << 10, "longest regex of an output", row="a `regex`", **_REFUSED)
    max_regex_length: int = _count(
        10_000, "characters of a regex with its repetitions written out",
        row="characters of a regex, and of a schema's `pattern`, with counted repetitions written out", **_REFUSED,
    )  # fmt: skip
    max_embedding_inputs: int = _count(
        1024, "inputs of one call for embeddings", row="`input` of /v1/embeddings and /pooling, prompts", **_REFUSED
    )
    max_rerank_documents: int = _count(
        1024, "documents of one call for scores", row="documents of /rerank, and texts of a side of /score", **_REFUSED
    )
    max_pooling_bytes: int = _size(
        4 << 20, "texts of one call for embeddings or scores, each as often as it is read",
        row="texts of a call for embeddings or scores; a query counts with each document that a reranker reads it "
        "with, a token id as 4 bytes", **_REFUSED,
    )  # fmt: skip
    max_choice_texts: int = _count(1024, "texts of a choice", row="texts of a `choice`", **_REFUSED)
    max_salt_chars: int = _count(
        1024, "longest cache_salt, in characters", row="characters of a `cache_salt`", **_REFUSED
    )
    max_requests_per_key: int = option(
        0, "requests of a key (or connection) that wait or run; 0 is no limit", panel="Limits", low=0,
        row="prompts of one key, or of one connection without keys, that wait or run, pins included; 0: no limit",
        past="429 `key_limit`; 400 if one call has more",
    )  # fmt: skip
    max_kv_share_per_key: float = same_option(
        EngineOptions, "max_kv_share_per_key", kind="flag", panel="Limits",
        row="share of the KV blocks that the running requests of one client hold, each counted as if it shared none; a "
        "client's only running request may take more",
        past="the request waits (`kv_share`), or is preempted when running ones have grown past it",
    )  # fmt: skip
    max_pinned_prefixes: int = option(
        MAX_PINNED_PREFIXES, "prefixes that may be pinned at a time; 0 is none", panel="Limits",
        low=0, high=MAX_PINNED_PREFIXES,
        row=f"pinned prefixes of all keys, those under way counted; no more than {MAX_PINNED_PREFIXES}; 0 switches the "
        "routes off",
        past="400; 404 where they are off",
    )  # fmt: skip
    max_pinned_share: float = _share(
        0.25, "share of the KV blocks that may be pinned",
        row="share of the KV blocks that pins of all keys hold, those under way counted", **_REFUSED,
    )  # fmt: skip
    max_pinned_share_per_key: float = _share(
        0.125, "share of the KV blocks that one key may pin",
        row="share of the KV blocks that the pins of one key hold", **_REFUSED,
    )  # fmt: skip
    pin_ttl: float = option(
        3600.0, "seconds until a prefix is unpinned; 0 is never", panel="Limits", low=0, unit="seconds"
    )
    max_session_bytes: int = _size(
        1 << 20, "messages of a session, as JSON", row="messages of a session, as JSON, without images", **_REFUSED
    )
    max_session_image_bytes: int = _size(
        32 << 20, "images of a session, as the model gets them",
        row="images of a session, 3 bytes for each pixel that the model gets", **_REFUSED,
    )  # fmt: skip
    max_saved_sessions: int = _count(
        1000, "sessions of all keys that are saved at a time", row="saved sessions of all keys", **_REFUSED
    )
    max_saved_sessions_per_key: int = _count(
        100, "sessions of a key that are saved at a time",
        row="saved sessions of one key, or of all clients without keys", **_REFUSED,
    )  # fmt: skip
    max_session_saves: int = _count(
        16, "sessions that are being saved, or wait for that",
        row="sessions that are being saved at once, or wait for that", past="429 `server_overloaded`",
    )  # fmt: skip
    max_saved_session_bytes: int = _size(
        16 << 30, "saved sessions of all keys on the disk", row="saved sessions of all keys on the disk", **_REFUSED
    )
    max_saved_session_bytes_per_key: int = _size(
        4 << 30, "saved sessions of a key on the disk",
        row="saved sessions of one key, or of all clients without keys, on the disk", **_REFUSED,
    )  # fmt: skip
    max_metric_labels: int = _count(
        MAX_LABELS, "API keys with a metric label of their own, and as many cache_salts",
        row="API keys with a label of their own in metrics, and as many salts",
        past="counted as `other`, or as their key",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check each value, and read sizes that are texts."""
        check_options(self)
        for name, _, _, declared in declared_options(Limits):
            if declared.metavar == SIZE:
                object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        if self.max_total_body_bytes < 4 * self.max_body_bytes:
            raise ConfigError(
                f"max_total_body_bytes must be at least 4 times max_body_bytes ({self.max_body_bytes}), "
                f"got {self.max_total_body_bytes}"
            )


DEFAULT_LIMITS = Limits()

# Fields of bodies with a bound on their elements.
MAX_ELEMENTS = {
    "messages": "max_messages",
    "tools": "max_tools",
    "stop": "max_stop_strings",
    "bad_words": "max_bad_words",
    "stop_token_ids": "max_stop_token_ids",
    "allowed_token_ids": "max_allowed_token_ids",
    "logit_bias": "max_logit_bias",
}


def parse_key_weights(texts: Sequence[str]) -> tuple[float, ...]:
    """Return the weights of keys from texts such as "2,1" (of the first keys) or "3=0.5" (of the third key)."""
    weights: dict[int, float] = {}
    for number, text in enumerate((part for each in texts for part in each.split(",")), 1):
        key, _, weight = text.rpartition("=")
        try:
            place = int(key) if key else number
            weights[place] = float(weight)
        except ValueError:
            place = 0
        if not 1 <= place <= _MAX_KEYS:
            raise ConfigError(f"key_weights must be weights such as 2,1 or KEY=WEIGHT such as 1=2, got {text!r}")
    return tuple(weights.get(place, 1.0) for place in range(1, max(weights, default=0) + 1))


def parse_names(name: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Return the values of a repeatable flag, each a text or a list of texts as JSON."""
    values: list[str] = []
    for text in texts:
        try:
            given = json.loads(text) if text.lstrip().startswith("[") else [text]
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} must be a text or a list of texts as JSON, got {text[:200]!r}") from error
        if not all(isinstance(each, str) and each for each in given):
            raise ConfigError(f"{name} must be a text or a list of texts as JSON, got {text[:200]!r}")
        values += given
    return tuple(values)


@dataclass(frozen=True, slots=True)
class ServerOptions(Limits):
    """Settings of the server beside its limits: addresses, keys, and behaviour when the engine fails or stalls."""

    host: str = _server(
        "127.0.0.1", "address to listen on",
        row="address to listen on; one that other machines reach needs `--api-key` or `--allow-unauthenticated`",
    )  # fmt: skip
    port: int = _server(8000, "port to listen on; 0 takes any free one", low=0, high=65535)
    uds: str | None = _server(
        None, "path of a Unix domain socket to listen on, in place of host and port", metavar="PATH",
        row="path of a Unix domain socket to listen on, in place of `--host` and `--port`; a file that a server left "
        "there is replaced, and all connections count as one client unless they have keys",
    )  # fmt: skip
    ssl_certfile: str | None = _access(
        None, "certificate to serve HTTPS with, as PEM", metavar="FILE",
        row="certificate to serve HTTPS with, as PEM, with those between it and the root; without it, HTTP",
    )  # fmt: skip
    ssl_keyfile: str | None = _access(
        None, "its private key, without a password; by default in the same file", metavar="FILE",
        row="its private key, as PEM and without a password; by default in the file of the certificate",
    )  # fmt: skip
    ssl_ca_certs: str | None = _access(
        None, "certificates of the authorities that sign clients' certificates", metavar="FILE",
        row="certificates of the authorities that sign clients' certificates, as PEM",
    )  # fmt: skip
    ssl_cert_reqs: int = _access(
        0, "certificates of clients: 0 not asked for, 1 checked if shown, 2 required", low=0, high=2,
        row="certificates of clients: 0 are not asked for, 1 are checked where shown, 2 are required",
    )  # fmt: skip
    ssl_ciphers: str | None = _access(
        None, "ciphers up to TLS 1.2, as OpenSSL names them", metavar="NAMES",
        row="ciphers up to TLS 1.2, as OpenSSL names them; by default those of Python",
    )  # fmt: skip
    models_dir: str | None = _server(
        None, "folder of models, in place of MODEL: each is loaded when a request names it", metavar="DIR",
        row="folder of models, in place of MODEL, or the hub's cache: each is loaded in a process of its own when a "
        "request names it ([model-names.md](model-names.md#one-server-for-several-models))",
    )  # fmt: skip
    models_max: int = _server(
        1, "of models_dir, models that are loaded at once", low=1, high=64,
        row="with `--models-dir`: models that are loaded at once; another one waits for a place, in order of arrival",
    )  # fmt: skip
    idle_unload: float = _server(
        300.0, "of models_dir, seconds without a request after which a model is unloaded; 0: never",
        low=0, high=30 * _LONGEST_S, unit="seconds",
        row="with `--models-dir`: seconds without a request after which a model is unloaded; 0: never, but for another "
        "model. `keep_alive` of a request of Ollama's API comes before it",
    )  # fmt: skip
    root_path: str = _server(
        "", "path under which a proxy serves this server", metavar="PATH",
        row="path under which a proxy serves this server, as `/llm`: requests with and without it are answered",
    )  # fmt: skip
    allowed_media_domains: tuple[str, ...] = _access(
        (), "hosts from which images are fetched, as JSON or repeatable; without any, none is fetched",
        metavar="HOST", parse=partial(parse_names, "allowed_media_domains"),
        row="hosts, by their exact names, from which images of requests are fetched: over https, from public "
        "addresses, without redirects, within 5 s; as JSON or repeatable. Without it images are `data:` URLs alone",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = _access(
        (), "origins of web pages that may call this server, as JSON or repeatable; * is all", metavar="ORIGIN",
        parse=partial(parse_names, "allowed_origins"),
        row='origins of web pages that may call this server (CORS): `\'["https://example.org"]\'`, or repeatable; '
        "`*` is all. Without it no page of another origin can read an answer",
    )  # fmt: skip
    allowed_methods: tuple[str, ...] = _access(
        ("*",), "methods that those pages may use", metavar="METHOD", parse=partial(parse_names, "allowed_methods"),
        row="methods that those pages may use, as above",
    )  # fmt: skip
    allowed_headers: tuple[str, ...] = _access(
        ("*",), "headers that those pages may send", metavar="HEADER", parse=partial(parse_names, "allowed_headers"),
        row="headers that those pages may send, as above",
    )  # fmt: skip
    allow_credentials: bool = _access(
        False, "let those pages send cookies and HTTP passwords",
        row="those pages may send cookies and HTTP passwords; needs origins by name",
    )  # fmt: skip
    enable_request_id_headers: bool = _server(
        False, "answer with the client's X-Request-Id",
        row="the `X-Request-Id` of an answer is the client's, if it sent one; the log has it as `client_request_id`",
    )  # fmt: skip
    enable_tokenizer_info_endpoint: bool = _server(
        False, "serve /tokenizer_info: the tokenizer's settings and chat template"
    )
    served_model_name: tuple[str, ...] = _server(
        (), "the model's name for clients (repeatable)", shown_default="the model's path or id", metavar="NAME",
        row="name of the model for clients, `quire-demo` for the demo model; repeatable; answers carry the one "
        "asked for",
    )  # fmt: skip
    lora_modules: tuple[str, ...] = _server(
        (), "a LoRA adapter as NAME=PATH (repeatable), or as JSON", metavar="NAME=PATH",
        row="LoRA adapter that clients name as a model: `sql=adapters/sql`, or `{\"name\": ..., \"path\": ..., "
        "\"base_model_name\": ...}`; repeatable; with `--enable-lora` ([adapters.md](adapters.md))",
    )  # fmt: skip
    allow_runtime_lora: bool = _server(
        False, "serve /v1/load_lora_adapter and /v1/unload_lora_adapter",
        row="serve `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, for folders below `--lora-root`; where there "
        "is an operator's key, with that key alone",
    )  # fmt: skip
    lora_root: str | None = _server(
        None, "folder below which those adapters are", metavar="FOLDER",
        row="folder below which adapters are that are loaded while the server runs; links out of it are refused",
    )  # fmt: skip
    api_key: tuple[str, ...] = _access(
        (), "a key that lets clients in (repeatable); better as QUIRE_API_KEY", metavar="KEY", is_secret=True,
        row="key that clients must send; repeatable; `QUIRE_API_KEY`, several separated by spaces",
    )  # fmt: skip
    operator_api_key: str | None = _access(
        None, "the operator's key: priorities, pins of all keys; better as QUIRE_OPERATOR_API_KEY", metavar="KEY",
        is_secret=True,
        row="opens what a key opens, and grants a `priority` below 0 and the pins of all keys; better as "
        "`QUIRE_OPERATOR_API_KEY`. It does not ask other clients for a key: `--api-key` does",
    )  # fmt: skip
    key_weights: tuple[float, ...] = _access(
        (), "shares of the keys under the policy fair, as 2,1 or KEY=WEIGHT (repeatable)", metavar="WEIGHTS",
        parse=parse_key_weights,
        row="weights of keys under `--scheduling-policy fair`; a key without one has 1: `2,1` for the first ones in "
        "the order of `--api-key`, or `3=0.5` for the third; repeatable",
    )  # fmt: skip
    allow_client_priority: bool = _access(
        False, "grant all clients a priority below 0", row="all clients may send a `priority` below 0"
    )
    allow_unauthenticated: bool = _access(
        False, "serve everyone who reaches a host that is not of this machine alone",
        row="serve every client that reaches the port",
    )  # fmt: skip
    tool_call_parser: str = _outputs(
        "auto", "format of tool calls in outputs: auto (by the chat template), a name, or none", metavar="NAME",
        row="format in which the model writes tool calls: `auto` (recognized by the chat template), one of the names "
        "in [tools.md](tools.md#formats), or `none`: calls that the model chooses remain text",
    )  # fmt: skip
    reasoning_parser: str = _outputs(
        "auto", "format of reasoning in outputs: auto (by the chat template), a name, or none", metavar="NAME",
        row="format in which the model writes its reasoning: `auto` (recognized by the chat template), one of the "
        "names in [tools.md](tools.md#formats), or `none`: reasoning is content",
    )  # fmt: skip
    reasoning_config: str = _outputs(
        "", "markers of reasoning, as JSON in vLLM's names: they must be those of the format", metavar="JSON",
        row="JSON in vLLM's names: `reasoning_start_str` and `reasoning_end_str` must be the markers of the format of "
        "`reasoning_parser`, by which reasoning is read and bounded; another value or key ends the start",
    )  # fmt: skip
    enable_auto_tool_choice: bool = _outputs(
        False, "accepted for vLLM's sake: tool_choice auto is always served",
        row="no effect: `tool_choice` `auto` is always served; vLLM needs the flag",
    )  # fmt: skip
    default_chat_template_kwargs: str = _outputs(
        "", "variables of the chat template, before those of requests, as JSON", metavar="JSON",
        row='JSON object of variables of the chat template, such as `{"enable_thinking": false}`; those of a request '
        "come before them",
    )  # fmt: skip
    enable_force_include_usage: bool = _outputs(
        False, "usage in every stream, as if clients had asked", row="every stream of `/v1/completions` and "
        "`/v1/chat/completions` has its usage, so far in each chunk and whole at its end, as with `stream_options` "
        "`include_usage` and `continuous_usage_stats`; clients that add up the usage of chunks, as langchain-openai "
        "1.7.3 does, count too much",
    )  # fmt: skip
    return_tokens_as_token_ids: bool = _outputs(
        False, "name tokens of logprobs by their ids, as if clients had asked", row="logprobs name tokens by their "
        "ids, as `token_id:123`, unless a body has `return_tokens_as_token_ids` `false`; `/v1/responses` too",
    )  # fmt: skip
    enable_per_request_metrics: bool = _outputs(
        False, "tell the times of a request in its response", row="`metrics` of responses and of final usage chunks of "
        "`/v1/completions`, `/v1/chat/completions` and `/v1/responses` has the [times](#times-of-a-request) of their "
        "request",
    )  # fmt: skip
    structured_outputs_config: str = _outputs(
        "", "defaults of outputs with grammars, as JSON in vLLM's names", metavar="JSON",
        row="JSON in vLLM's names: `disable_any_whitespace`, `disable_additional_properties` (both false): defaults "
        "of requests; `enable_in_reasoning` (false): grammars hold during reasoning too; `backend`, "
        "`disable_fallback` and `reasoning_parser` have no effect; another key is refused",
    )  # fmt: skip
    stall_limit: float = _recovery(  # the engine sends a heartbeat four times a second
        10.0, "seconds without progress while work is pending, after which /health is 503",
        low=1, high=_LONGEST_S, unit="seconds",
        row="seconds, at least 1: with work pending and no progress for so long, `/health` and `/ready` are 503, as "
        "are new requests at once (`engine_unhealthy`), and the log has the stacks of all threads. A long step counts "
        "as progress while its layers pass; on a CPU a single layer may take longer than the limit, as long as its "
        "work explains that (5 times what the layers before it took, by their work). A task of the server that has "
        "died makes them 503, too. An engine without work is asked for a sign once per limit. With "
        "`--data-parallel-size` above 1 or `--restart-engine`, an engine without progress for so long is ended and "
        "started again; with `--tensor-parallel-size` above 1, one of which a process is stopped for so long ends",
    )  # fmt: skip
    start_timeout: float = _recovery(
        START_TIMEOUT_S,
        "seconds without a sign of life (CPU time, reads) after which an engine that starts is given up",
        low=1, high=_LONGEST_S, unit="seconds",
        row="seconds, at least 1: an engine that starts and neither uses CPU time nor reads for so long is given up, "
        "and the server ends with status 1 and one line that says so (with `--restart-engine` the next one is tried). "
        "A start that makes progress takes as long as it takes. With `--nnodes` above 1, four fifths of it are for the "
        "other nodes to find node 0, and nine tenths for it to find all of them",
    )  # fmt: skip
    stream_keepalive: float = _recovery(
        15.0, "seconds without news after which a stream gets a comment; 0: never",
        low=0, high=_LONGEST_S, unit="seconds",
        row="seconds without news after which a stream gets a comment, `: keepalive`, which clients ignore; 0: never. "
        "Load balancers cut connections that are silent for longer than their own limit",
    )  # fmt: skip
    restart_engine: int = _recovery(
        0, "how often a new engine takes the place of one that has died", low=0, high=1000,
        row="number of times that a new engine replaces one that has died, or that is ended because it makes no "
        "progress for `--stall-limit`, over the server's life: at once, almost "
        "(0.5 s), then after pauses that double up to 30 s. Meanwhile `/health` is 503; open streams have ended with "
        "an error; counters of `/metrics` go on; pinned prefixes are gone, and their ids unknown",
    )  # fmt: skip
    shutdown_timeout: float = _recovery(
        30.0, "seconds that open requests get after SIGTERM", low=0, high=_LONGEST_S, unit="seconds",
        row="seconds that open requests get after SIGTERM or Ctrl-C; a second signal ends at once",
    )  # fmt: skip
    log_level: Level = _server(
        "info", "lowest level of lines in the log", row="lowest level of lines in the log, of all processes; `debug` "
        "has probes, too",
    )  # fmt: skip
    log_format: Form = _server(
        "mixed", "json: all lines are JSON; text: all are text; mixed: those of requests are JSON",
        row="`json`: every line of the log is a JSON object; `text`: all are text; `mixed`: those of requests are JSON "
        "([log](#log))",
    )  # fmt: skip
    log_file: str | None = _server(
        None, "file to append the log to, which may be renamed at any time", metavar="PATH",
        shown_default="standard error",
        row="file that the log is appended to; created with mode 0600, and opened again where it was renamed",
    )  # fmt: skip
    log_requests: float = _server(
        1.0, "share of the requests with a line in the log; 0: none", low=0, high=1,
        row="share of the requests that have a line in the log: 1 for all, 0.01 for each hundredth, 0 for none; unless "
        "it is 0, a request that fails (status 400 and above, or no answer) always has one",
    )  # fmt: skip
    otlp_traces_endpoint: str | None = _server(
        None, "URL that traces of requests are sent to, by OTLP/HTTP (quire[otel])", metavar="URL",
        row="URL that a span of each request and of its stages are sent to, by OTLP/HTTP: "
        "[traces](metrics.md#traces); needs `quire[otel]`; one without a path gets `/v1/traces`",
    )  # fmt: skip
    profile_dir: str | None = _server(
        None, "folder for profiles: serve /start_profile and /stop_profile", metavar="FOLDER",
        row="serve `/start_profile` and `/stop_profile`, which write [profiles](#profiles) to this folder",
    )  # fmt: skip
    enable_debug: bool = _server(
        False, "serve /debug/kv and /debug/blocks, the KV cache block by block, and /debug/top, the latest steps",
        row="serve `/debug/kv` and `/debug/blocks`, the KV cache block by block, for every client that has a key, and "
        "`/debug/top`, the latest 3,600 steps of each engine, for the operator's alone where there is one",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check ranges and keys, and that a server which other machines reach has a key or was meant to have none."""
        Limits.__post_init__(self)
        if not self.host:
            raise ConfigError("host must not be empty; 0.0.0.0 is every address of this machine")
        if any(len(key.split()) != 1 or key != key.strip() for key in self.api_key):  # no client could send it
            raise ConfigError("api_key must not be empty or have spaces")
        self._check_operator_key()
        _ = self.outputs_config, self.template_variables
        self._check_key_weights()
        if not all(name and name.isprintable() for name in self.served_model_name):
            raise ConfigError("served_model_name must not be empty or have control characters")
        _ = self.adapters
        self._check_models_dir()
        if self.allow_runtime_lora and self.lora_root is None:
            raise ConfigError("allow_runtime_lora needs lora_root, the folder of the adapters")
        self._check_paths()
        self._check_tls()
        for host in self.allowed_media_domains:
            if not _HOST_NAME.fullmatch(host.lower()):
                raise ConfigError(f"allowed_media_domains must be names such as example.org, got {host[:200]!r}")
        if self.traces_url is not None:
            with needs_library("otlp_traces_endpoint", "opentelemetry", "'quire[otel]'"):
                import opentelemetry.sdk.version  # noqa: F401, PLC0415 (optional)
        if not (self.api_key or self.allow_unauthenticated or self.uds is not None or _is_loopback(self.host)):
            raise ConfigError(
                f"host {self.host} can be reached by others: set api_key, or allow_unauthenticated to serve everyone, "
                f"or host to 127.0.0.1"
            )

    @property
    def adapters(self) -> tuple[AdapterModule, ...]:
        """The lora_modules, parsed. ConfigError names what is wrong."""
        return parse_modules(self.lora_modules)

    @property
    def outputs_config(self) -> StructuredOutputsConfig:
        """The structured_outputs_config, parsed. ConfigError names what is wrong."""
        return parse_config(self.structured_outputs_config)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The default_chat_template_kwargs, parsed. ConfigError if they are no JSON object."""
        return parse_json_object(self.default_chat_template_kwargs, "default_chat_template_kwargs")

    @property
    def traces_url(self) -> str | None:
        """The otlp_traces_endpoint with its path. ConfigError for a text that is no URL of OTLP/HTTP."""
        given = self.otlp_traces_endpoint
        if given is None:
            return None
        try:
            url = urlsplit(given)
            is_url = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
        except ValueError:
            is_url = False
        if not is_url or not (given.isascii() and given.isprintable()) or " " in given:
            raise ConfigError(
                "otlp_traces_endpoint must be an http or https URL of OTLP/HTTP, such as "
                f"http://localhost:4318/v1/traces, got {given[:200]!r}"
            )
        if "@" in url.netloc:
            raise ConfigError("otlp_traces_endpoint must have no password; OTEL_EXPORTER_OTLP_HEADERS has headers")
        return given if url.path.strip("/") else f"{url.scheme}://{url.netloc}/v1/traces"

    def with_engine_settings(self, engine: EngineOptions) -> EngineOptions:
        """Return an engine's options with the settings that are flags of a server."""
        return replace(
            engine, max_kv_share_per_key=self.max_kv_share_per_key, stall_limit=self.stall_limit,
            start_timeout=self.start_timeout,
        )  # fmt: skip

    def weight_of(self, key_number: int) -> float:
        """Return the weight of a key, from 1; that of all others is 1."""
        return self.key_weights[key_number - 1] if 0 < key_number <= len(self.key_weights) else 1.0

    def _check_models_dir(self) -> None:
        if self.models_dir is None:
            return
        for name in ("served_model_name", "lora_modules", "allow_runtime_lora"):
            if getattr(self, name):
                raise ConfigError(f"{name} is of one model, and models_dir has several")

    def _check_tls(self) -> None:
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} needs ssl_certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"ssl_cert_reqs {self.ssl_cert_reqs} needs ssl_ca_certs")

    def _check_paths(self) -> None:
        if self.uds == "":
            raise ConfigError("uds must be a path, got ''")
        if self.root_path and not (self.root_path.startswith("/") and not self.root_path.endswith("/")):
            raise ConfigError(f"root_path must begin with / and not end with it, got {self.root_path!r}")
        if not self.root_path.isascii() or "%" in self.root_path:
            raise ConfigError(f"root_path must be ASCII without escapes, got {self.root_path!r}")
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise ConfigError("allow_credentials needs allowed_origins by name, not *")

    def _check_operator_key(self) -> None:
        key = self.operator_api_key
        if key is not None and (len(key.split()) != 1 or key != key.strip()):
            raise ConfigError("operator_api_key must not be empty or have spaces")
        if key is not None and key in self.api_key:
            raise ConfigError("operator_api_key must not be one of api_key")

    def _check_key_weights(self) -> None:
        if len(self.key_weights) > len(self.api_key):
            raise ConfigError(
                f"key_weights must be for the {len(self.api_key)} keys of api_key, got {len(self.key_weights)} weights"
            )
        for weight in self.key_weights:
            if not 0 < weight < math.inf:
                raise ConfigError(f"key_weights must be above 0 and finite, got {weight}")


def _is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`. A name other than localhost may be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
