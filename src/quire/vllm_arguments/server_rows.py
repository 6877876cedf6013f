"""Rows of the arguments that only servers have: those of vLLM's front end."""

from dataclasses import replace

from quire.vllm_arguments.rows import (
    Row,
    accepted,
    config,
    number,
    real,
    refused,
    renamed,
    same,
    switch,
    text,
    texts,
)

_ROWS = (
    same(text("host"), "127.0.0.1 by default; another one needs a key or `--allow-unauthenticated`"),
    same(number("port")),
    same(texts("api_key"), "repeatable, too"),
    same(text("config")),
    same(
        text("tool_call_parser"),
        "`auto`, the default, too: by the chat template ([tools](tools.md)); names of formats that have no parser here "
        "end the start with a list of those that have",
    ),
    same(switch("enable_auto_tool_choice"), "no effect: `tool_choice` `auto` is always served"),
    renamed(number("sse_keep_alive_interval"), "stream_keepalive", "15 seconds"),
    renamed(number("h11_max_header_count"), "max_headers", "100"),
    renamed(number("h11_max_incomplete_event_size"), "max_header_bytes", "32 KiB; bodies: `--max-body-bytes`"),
    *accepted("prompts and outputs are never logged", number("max_log_len"), switch("enable_log_deltas")),
    *refused("prompts and outputs are never logged", switch("enable_log_outputs")),
    *accepted(
        "the log has one JSON line for each request, without prompt and output, and none for probes",
        switch("enable_log_requests"), text("uvicorn_log_level"), switch("disable_uvicorn_access_log"),
        text("disable_access_log_for_endpoints"),
    ),
    *accepted("errors of the server are always logged with their stack", switch("log_error_stack")),
    *accepted("usage always has prompt_tokens_details", switch("enable_prompt_tokens_details")),
    *accepted("requests are always counted: see `/metrics`", switch("enable_server_load_tracking")),
    *accepted("one process serves HTTP", number("api_server_count", flags=("-asc",)),
              number("data_parallel_supervisor_port"), real("dp_supervisor_probe_interval_s"),
              real("dp_supervisor_probe_timeout_s"), number("dp_supervisor_probe_failure_threshold")),
    *accepted("there are no routes of Cohere's", switch("cohere_is_reasoning_model"), text("cohere_format")),
    *accepted("there are no pages of documentation; the schema is at /openapi.json", switch("disable_fastapi_docs"),
              switch("enable_offline_docs")),
    *accepted("requests have no images, audio or video", switch("trust_request_mm_kwargs"),
              switch("enable_flash_late_interaction")),
    *refused("the fingerprint is Quire's version", text("fingerprint_mode", "full", "hash"),
             text("fingerprint_value")),
    *refused("LoRA adapters are not served", texts("lora_modules")),
    *refused("no code from outside is run", texts("middleware"), text("tool_parser_plugin")),
    *refused("tools run at clients", text("tool_server")),
    *refused("set `strict` of each tool", text("tool_strict_level", "auto")),
    *refused("tools of a request are always given to the chat template", switch("exclude_tools_when_tool_choice_none")),
    *refused("the chat template is the model's", text("chat_template"), text("chat_template_content_format", "auto"),
             switch("trust_request_chat_template"), config("default_chat_template_kwargs")),
    *refused("efforts of reasoning are given to the chat template as they are", config("reasoning_effort_map"),
             text("anthropic_disabled_thinking_effort", "auto")),
    *refused("answers are the assistant's", text("response_role", "assistant")),
    *refused("requests ask for it one by one", switch("return_tokens_as_token_ids"),
             switch("enable_force_include_usage"), switch("enable_per_request_metrics")),
    *refused("serve TLS with a proxy in front", text("ssl_keyfile"), text("ssl_certfile"), text("ssl_ca_certs"),
             switch("enable_ssl_refresh"), number("ssl_cert_reqs", 0), text("ssl_ciphers")),
    *refused("only HTTP is served", number("grpc_port"), switch("grpc"), switch("headless"),
             switch("enable_scale_out")),
    *refused("not there yet", text("uds"), text("root_path"), config("allowed_origins"), config("allowed_methods"),
             config("allowed_headers"), switch("allow_credentials"), switch("enable_tokenizer_info_endpoint"),
             switch("enable_request_id_headers")),
)

SERVER_ROWS: tuple[Row, ...] = tuple(replace(row, is_engine=False) for row in _ROWS)
