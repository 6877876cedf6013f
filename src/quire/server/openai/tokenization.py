"""Text to token ids and back, without the engine."""

import asyncio

from quire.core.checks import check_token_ids, refuse
from quire.server.errors import invalid
from quire.server.openai.answer_format import encode
from quire.server.openai.bodies import DetokenizeBody, TokenizeBody
from quire.server.openai.preparation import render
from quire.server.service import Service
from quire.text.tokenizer import Tokenizer


async def tokenized(service: Service, body: TokenizeBody) -> bytes:
    """Return the answer to /tokenize."""
    tokenizer = _tokenizer(service)
    if (body.prompt is None) == (body.messages is None):
        invalid("give either prompt or messages", param="prompt")
    text, adds_special_tokens = body.prompt or "", body.add_special_tokens is not False
    if body.messages is not None:
        text = await render(service, body.messages, body)
        adds_special_tokens = bool(body.add_special_tokens)  # a template names them itself

    def answer() -> bytes:
        tokens = tokenizer.encode(text, adds_special_tokens)
        return encode({
            "count": len(tokens),
            "max_model_len": service.client.ready.limits.max_model_len,
            "tokens": tokens,
            "token_strs": [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None,
        })

    return await asyncio.get_running_loop().run_in_executor(service.threads_for(len(text)), answer)


async def detokenized(service: Service, body: DetokenizeBody) -> bytes:
    """Return the answer to /detokenize. Special tokens are part of the text."""
    tokenizer = _tokenizer(service)
    num_given = len(body.tokens) if isinstance(body.tokens, list) else 0

    def answer() -> bytes:
        tokens, vocab_size = check_token_ids("tokens", body.tokens), service.client.ready.vocab_size
        if max(tokens, default=0) >= vocab_size:
            refuse("tokens", max(tokens), f"token ids below the vocabulary size of {vocab_size}")
        return encode({"prompt": tokenizer.decode(tokens, skip_special_tokens=False)})

    return await asyncio.get_running_loop().run_in_executor(service.threads_for(num_given), answer)


def _tokenizer(service: Service) -> Tokenizer:
    if service.client.tokenizer is None:
        invalid("the model has no tokenizer", param="model")
    return service.client.tokenizer
