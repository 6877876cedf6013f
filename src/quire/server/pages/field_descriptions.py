"""Descriptions and examples of the fields of request bodies, for /openapi.json and /docs. docs/reference.md says more.

A field means the same in all routes that have it; OTHER_EXAMPLES has those of routes where its form differs. NESTED has
the fields of objects in fields.
"""

from collections.abc import Iterator
from typing import Any

_MESSAGE = {"role": "user", "content": "What is water made of?"}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_NO_EFFECT = "Accepted, and changes nothing."
_STORED = "Refused: it needs stored state, which this server has not."

# Description and example of each field.
FIELDS: dict[str, tuple[str, Any]] = {
    "add_generation_prompt": ("End the rendered conversation where the assistant begins to speak.", True),
    "add_special_tokens": ("Let the tokenizer add special tokens, as that of the beginning of a sequence.", False),
    "allowed_token_ids": ("Tokens that an answer may have; no others.", [42, 43]),
    "answer_id": ("Id of one of the last answers: the session has its prompt and its tokens.", "cmpl-1"),
    "at": ("Tokens before the fork, of an answer or of a session; all of them, if left out.", 8),
    "background": (_STORED, False),
    "bad_words": ("Texts that an answer must not have.", ["secret"]),
    "best_of": ("Only the same as n.", 1),
    "cache_control": ("Pin the prefix up to the last block that has this mark.", {"type": "ephemeral"}),
    "kv_transfer_params": (
        "Prefill apart from decoding, in vLLM's form: `do_remote_decode` asks a producer to keep the prompt's KV "
        "blocks; what its answer has in this field lets a consumer fetch them.", {"do_remote_decode": True},
    ),
    "cache_salt": ("Requests with the same salt alone find each other's prefixes in the cache.", "team-a"),
    "chat_template_kwargs": ("Variables of the chat template.", {"enable_thinking": False}),
    "context_management": ("Nothing is removed; edits that would remove something are left out with a warning.", {}),
    "continue_final_message": ("Continue the last message instead of beginning one.", False),
    "conversation": (_STORED, None),
    "data_1": ("First text of each pair: one for all, or as many as data_2.", "What is water made of?"),
    "data_2": ("Second text of each pair.", ["Hydrogen and oxygen.", "Paper."]),
    "deadline_ms": ("End the request if it is not finished so many milliseconds after its arrival.", 30000),
    "dimensions": ("Dimensions of an embedding that are kept; of Matryoshka embeddings.", 256),
    "documents": (
        "Texts that are ordered or scored; of a chat, a variable of its template.",
        ["Hydrogen and oxygen.", "Paper."],
    ),
    "echo": ("Begin the answer with the prompt; of a chat, with its last message.", False),
    "embedding_types": ("Forms of the vectors: float, base64, binary, ubinary.", ["float"]),
    "enable_response_messages": ("Return the rendered prompt and the output with its markers, too.", False),
    "encoding_format": ("Vectors as lists of numbers, or as base64 of little-endian float32.", "float"),
    "filename": ("Name of the saved session, as name.", "handbook"),
    "frequency_penalty": ("Taken off a token's logit once for each time that the answer has it.", 0.0),
    "guided_choice": ("Earlier name of structured_outputs.choice: the answer is one of these.", ["yes", "no"]),
    "guided_grammar": ("Earlier name of structured_outputs.grammar: Lark or GBNF.", 'start: "yes" | "no"'),
    "guided_json": ("Earlier name of structured_outputs.json: a JSON schema of the answer.", _CITY),
    "guided_regex": ("Earlier name of structured_outputs.regex: it matches the whole answer.", "[0-9]+"),
    "guided_whitespace_pattern": ("Earlier name of structured_outputs.whitespace_pattern.", " ?"),
    "ignore_eos": ("Go on after the end-of-sequence token.", False),
    "include": (
        "message.output_text.logprobs adds logprobs; other names are accepted.",
        ["message.output_text.logprobs"],
    ),
    "include_reasoning": ("Return the reasoning of the answer.", True),
    "include_stop_str_in_output": ("End the answer with the stop string that ended it.", False),
    "index": ("Which of the n answers to a prompt is meant.", 0),
    "input": ("Text, token ids, or a list of them; of responses, a text or items.", "What is water made of?"),
    "instruction": ("What a reranker is told to look for.", "Find the passage that answers the question."),
    "instructions": ("System message before the input.", "Answer in one sentence."),
    "items": ("Another name of documents.", ["Hydrogen and oxygen.", "Paper."]),
    "length_penalty": ("Of beams: a score is the logprob divided by the number of tokens to this power.", 1.0),
    "logit_bias": ("Numbers added to the logits of tokens, by their ids.", {"42": -5.0}),
    "logprob_token_ids": ("Report the logprobs of these tokens.", [42, 43]),
    "logprobs": ("Report logprobs of the answer: of completions how many, of chats whether.", 3),
    "load_inplace": ("Also if the name is an adapter's.", False),
    "lora_int_id": (_NO_EFFECT, 1),
    "lora_name": ("Name of the adapter, by which clients ask for it as a model.", "sql"),
    "lora_path": ("Folder of the adapter, below --lora-root.", "adapters/sql"),
    "max_completion_tokens": ("Most tokens of an answer; wins over max_tokens.", 200),
    "max_output_tokens": ("Most tokens of an answer.", 200),
    "max_tokens": ("Most tokens of an answer; of /v2/embed, of a text.", 200),
    "max_tokens_per_doc": ("Most tokens of a document; longer ones are cut.", 512),
    "max_tokens_per_query": ("Most tokens of a query; a longer one is cut.", 128),
    "max_tool_calls": (_NO_EFFECT, 4),
    "messages": ("Conversation: messages with role and content.", [_MESSAGE]),
    "metadata": ("Changes nothing; of responses, repeated in the answer.", {"purpose": "test"}),
    "min_p": ("Keep tokens that are at least this likely, relative to the likeliest.", 0.05),
    "min_tokens": ("Fewest tokens of an answer.", 0),
    "model": ("Name of the model or of a LoRA adapter; without it, the model.", "quire-demo"),
    "n": ("Answers to each prompt; their prompt is computed once.", 1),
    "name": ("Name of the saved session: 1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-'.", "handbook"),
    "output_config": ("Form (format) and effort of the answer.", {"effort": "low"}),
    "output_dimension": ("Dimensions of an embedding that are kept; of Matryoshka embeddings.", 256),
    "output_format": ("Earlier name of output_config.format.", {"type": "json_schema", "schema": _CITY}),
    "parallel_tool_calls": ("Allow more than one tool call in an answer.", True),
    "presence_penalty": ("Taken off the logit of every token that the answer has.", 0.0),
    "previous_response_id": (_STORED, None),
    "priority": ("Lower is admitted first; below 0 for the operator alone.", 0),
    "prompt": ("Text or token ids, or a list of one of both.", "Once upon a time"),
    "prompt_cache_key": ("Changes nothing; of responses, repeated in the answer.", "session-1"),
    "prompt_cache_retention": ("Changes nothing; repeated in the answer.", "24h"),
    "prompt_index": ("Which of the prompts of the call is meant.", 0),
    "prompt_logprob_start": ("First position of prompt_logprob_token_ids.", 0),
    "prompt_logprob_token_ids": (
        "Tokens at each position of the prompt of which the logprobs are reported.", [[42, 43]],
    ),
    "prompt_logprobs": ("Report logprobs of the prompt: how many at each position.", 1),
    "queries": ("Another name of text_1, with documents.", "What is water made of?"),
    "query": ("Text for which documents are ordered.", "What is water made of?"),
    "reasoning": ("Effort of reasoning.", {"effort": "low"}),
    "reasoning_effort": ("Effort of reasoning, for templates that know it; none is no reasoning.", "low"),
    "repetition_detection": (
        "End an answer in which a pattern of tokens repeats.", {"max_pattern_size": 20, "min_count": 4}
    ),
    "repetition_penalty": ("Divides the logits of known tokens; 1 is off.", 1.0),
    "response_format": (
        "Form of the answer: text, json_object, json_schema or structural_tag.", {"type": "json_object"},
    ),
    "restore": ("Name of a saved session.", "handbook"),
    "return_documents": ("Return the documents with their scores.", True),
    "return_prompt_text": ("Return the rendered prompt.", False),
    "return_token_ids": ("Return the token ids of prompt and answer.", False),
    "return_token_strs": ("Return what the vocabulary has for the tokens.", False),
    "return_tokens_as_token_ids": ("Name tokens of logprobs by their ids, as token_id:123.", False),
    "safety_identifier": ("Changes nothing; of responses, repeated in the answer.", "user-1"),
    "seed": ("Seed of sampling: the same request with it has the same answer.", 7),
    "session_id": ("Session that the prompt, or the messages, continue.", "session-1"),
    "skip_special_tokens": ("Leave special tokens out of the text.", True),
    "spaces_between_special_tokens": ("Only true, unless special tokens are left out.", True),
    "stop": ("Text, or texts, that end an answer.", ["\n\n"]),
    "stop_sequences": ("Texts that end an answer.", ["\n\n"]),
    "stop_token_ids": ("Tokens that end an answer.", [2]),
    "store": (_NO_EFFECT, False),
    "stream": ("Send the answer as server-sent events, token by token.", True),
    "stream_options": ("include_usage: the last event has the usage.", {"include_usage": True}),
    "structural_tag": ("Text with parts that have a form.", {"type": "structural_tag", "format": {"type": "any_text"}}),
    "structured_outputs": (
        "Form of the answer: json, regex, choice, grammar or structural_tag.", {"choice": ["yes", "no"]},
    ),
    "system": ("System message.", "Answer in one sentence."),
    "task": ("What the vector is for, as a check: embed.", "embed"),
    "temperature": ("0 takes the likeliest token; 1 samples as the model says.", 0.7),
    "text": ("Form of the answer, in format.", {"format": {"type": "text"}}),
    "text_1": ("First text of each pair: one for all, or as many as text_2.", "What is water made of?"),
    "text_2": ("Second text of each pair.", ["Hydrogen and oxygen.", "Paper."]),
    "texts": ("Texts to embed.", ["What is water made of?"]),
    "thinking": ("Ask the template for reasoning (enabled, adaptive) or for none (disabled).", {"type": "disabled"}),
    "thinking_token_budget": ("Most tokens of reasoning; -1 is no bound.", 512),
    "tokens": ("Token ids.", [1, 2, 3]),
    "tool_choice": ("none, auto, required, or one tool by its name.", "auto"),
    "tools": (
        "Functions that the model may call, with a JSON schema of their arguments.",
        [{"type": "function", "function": {"name": "get_weather", "parameters": _CITY}}],
    ),
    "top_k": ("Keep so many of the likeliest tokens; 0 keeps all.", 40),
    "top_logprobs": ("Likeliest tokens to report at each position.", 3),
    "top_n": ("Documents to return; 0 is all.", 0),
    "top_p": ("Keep the likeliest tokens that make up this share.", 0.95),
    "truncate": ("End of a text that is cut to max_tokens; NONE refuses a longer one.", "END"),
    "truncate_prompt_tokens": ("Keep at most so many tokens of a prompt.", 1024),
    "truncation": (f"{_NO_EFFECT} A longer input is always refused.", "disabled"),
    "truncation_side": ("Side of a prompt that is cut.", "left"),
    "ttl": ("Seconds until the session ends; at most --pin-ttl.", 600),
    "ttft_deadline_ms": (
        "End the request if its first token is not there so many milliseconds after its arrival.", 2000,
    ),
    "use_activation": ("Normalize embeddings; make a score a probability.", True),
    "use_beam_search": ("Search for the likeliest answers, with n beams, instead of sampling.", False),
    "user": ("Changes nothing; of responses, repeated in the answer.", "user-1"),
}  # fmt: skip


_BLOCKS = {
    "context_management": {}, "tool_choice": {"type": "auto"},
    "tools": [{"name": "get_weather", "input_schema": _CITY}],
}  # fmt: skip
OTHER_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"documents": [{"title": "Water", "text": "Hydrogen and oxygen."}], "logprobs": True},
    "/v1/messages": _BLOCKS,
    "/v1/messages/count_tokens": _BLOCKS,
    "/v1/responses": {
        "context_management": [], "prompt": None,
        "tools": [{"type": "function", "name": "get_weather", "parameters": _CITY}],
    },
}  # fmt: skip


_NAMED_TOOL = {"type": "function", "function": {"name": "get_weather"}}
# The same of the fields of objects in fields, by name, or by the names of the object's field and its own. Where the
# schema lists the values, the example is the first of them.
NESTED: dict[str, tuple[str, Any]] = {
    "allowed_tools": ("Tools that may be called.", {"mode": "auto", "tools": [_NAMED_TOOL]}),
    "cache_control": ("Pin the prefix up to the end of this block.", {"type": "ephemeral"}),
    "clear_at": ("next_user_message: left out once the user has said more.", "next_user_message"),
    "content": ("Text, or a list of parts: texts, and images where the model reads them.", "What is water made of?"),
    "continuous_usage_stats": ("Send the usage with every event.", True),
    "description": ("What the function does, for the model.", "Weather of a city."),
    "detail": ("Accepted, and changes nothing.", "auto"),
    "disable_parallel_tool_use": ("Allow one call in an answer alone.", True),
    "effort": ("How much reasoning the answer is worth.", "low"),
    "format": ("Form of the answer.", {"type": "json_schema", "schema": _CITY}),
    "function": ("The function of the tool.", {"name": "get_weather"}),
    "generate_summary": ("Earlier name of summary.", "auto"),
    "id": ("Id of the call, which its result names.", "call_1"),
    "image_url": ("An image of the message.", {"url": "data:image/png;base64,iVBORw0KGgo="}),
    "include_usage": ("End the stream with an event that has the usage.", True),
    "input": ("Arguments of the call.", {"city": "Paris"}),
    "input_schema": ("JSON schema of the arguments.", _CITY),
    "max_pattern_size": ("Tokens of the longest pattern that is looked for; 0 is off.", 20),
    "min_count": ("Repetitions in a row that end the answer.", 4),
    "min_pattern_size": ("Tokens of the shortest pattern that is looked for.", 1),
    "mode": ("auto, or required: one of them must be called.", None),
    "name": ("Name of the function.", "get_weather"),
    "output_config": ("Effort of the answer, from this message on.", {"effort": "low"}),
    "parameters": ("JSON schema of the arguments.", _CITY),
    "parameters.type": ("Arguments are always an object.", None),
    "refusal": ("Text of a refusal, an answer like any other for the template.", "I cannot help with that."),
    "role": ("Speaker of the message: system, user, assistant or tool.", "user"),
    "schema": ("JSON schema of the answer.", _CITY),
    "strict": ("Hold the arguments to their schema by a grammar.", True),
    "summary": (f"{_NO_EFFECT} Reasoning itself is part of the output.", "auto"),
    "text": ("Text of the part.", "What is water made of?"),
    "thinking": ("Text of the reasoning.", "Water is a molecule."),
    "tool_use_id": ("Id of the call that this is the result of.", "call_1"),
    "tools": ("Tools that may be called, by name.", [_NAMED_TOOL]),
    "ttl": ("How long the prefix is kept from its last use on.", None),
    "type": ("Kind of the object.", "function"),
    "input.type": ("Kind of the item.", "message"),
    "url": ("A data: URL with the image as base64, or one of a listed host.", "data:image/png;base64,iVBORw0KGgo="),
    "verbosity": ("Changes nothing; repeated in the answer.", None),
}  # fmt: skip


def describe_fields(path: str, properties: dict[str, dict[str, Any]]) -> None:
    """Add to each field of a route's body, and of the objects in it, its description and an example."""
    for name in properties.keys() & FIELDS.keys():
        description, example = FIELDS[name]
        properties[name]["description"] = description
        properties[name]["examples"] = [OTHER_EXAMPLES.get(path, {}).get(name, example)]
        for parent, own, field in nested_fields(name, properties[name]):
            description, example = NESTED[f"{parent}.{own}" if f"{parent}.{own}" in NESTED else own]
            values = [kind["enum"][0] for kind in field.get("anyOf", [field]) if "enum" in kind]
            example = field["const"] if "const" in field else values[0] if values else example
            field |= {"description": description, "examples": [example]}


def nested_fields(name: str, schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the fields of the objects in a field, however deep: name of the object's field, own name, own schema.

    Objects in a list have the name of the list.
    """
    for own, field in schema.get("properties", {}).items():
        yield name, own, field
        yield from nested_fields(own, field)
    for kind in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        yield from nested_fields(name, kind)
