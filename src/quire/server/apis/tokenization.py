"""Routes /tokenize, /detokenize and /tokenizer_info: texts to token ids and back, off the event loop."""

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from quire.core.checks import check_token_ids, refuse
from quire.core.token_ids import pack_tokens
from quire.engine.requests.image_prompts import NumberedImage
from quire.server.api.chat import numbered_images, rendered
from quire.server.api.http_responses import JsonStream, array, encode, encode_streamed, json_response
from quire.server.api.request_bodies import read_body, request_body
from quire.server.apis.completions.completion_bodies import DetokenizeBody, TokenizeBody
from quire.server.apis.completions.completion_routes import conversation_of
from quire.server.errors import invalid
from quire.server.http.application import CLIENT_ID
from quire.server.service import AdmittedCall, Service
from quire.text.tokenizer import Tokenizer
from quire.text.tools import check_tools

router = APIRouter()
settings_router = APIRouter()
_TOKENS_PER_SLICE = 4096  # encoded in one call, which keeps all other threads from running


@router.post("/tokenize", openapi_extra=request_body(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Turn a prompt or a conversation into token ids."""
    service: Service = request.app.state.service
    body = await read_body(request, TokenizeBody)
    service.check_model(body.model)
    client_id = request.scope[CLIENT_ID]
    with service.admit(1, client_id=client_id) as admitted:
        return json_response(await _tokenized(service, body, admitted, client_id))


@router.post("/detokenize", openapi_extra=request_body(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Turn token ids into text."""
    service: Service = request.app.state.service
    body = await read_body(request, DetokenizeBody)
    service.check_model(body.model)
    client_id = request.scope[CLIENT_ID]
    with service.admit(1, param="tokens", client_id=client_id):
        return json_response(await _detokenized(service, body, client_id))


@settings_router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Return the settings of tokenizer_config.json, with special tokens as texts, and the chat template."""
    service: Service = request.app.state.service
    return json_response(_tokenizer(service).describe())


async def _tokenized(service: Service, body: TokenizeBody, admitted: AdmittedCall, client_id: str) -> bytes:
    """Return the response of /tokenize."""
    tokenizer = _tokenizer(service)
    if (body.prompt is None) == (body.messages is None):
        invalid("give either prompt or messages", param="prompt")
    text, adds_special_tokens = body.prompt or "", body.add_special_tokens is not False
    numbered: Sequence[NumberedImage] = ()
    if body.messages is not None:
        adds_special_tokens = bool(body.add_special_tokens)
        tools = [] if body.tools is None else check_tools(body.tools)
        conversation = conversation_of(service, body, body.messages, tools)
        text, images = await rendered(service, conversation, client_id)
        numbered = await numbered_images(service, images, admitted, client_id)

    def response() -> bytes:
        prompts = service.client.inputs.images
        if body.messages is None or prompts is None or not prompts.needs_places(text):
            tokens = tokenizer.encode(text, adds_special_tokens)
        else:
            written = pack_tokens(tokenizer.encode(prompts.written(text), adds_special_tokens))
            tokens = prompts.placed(text, written, numbered)[0].tolist()
        parts = [tokens[start : start + _TOKENS_PER_SLICE] for start in range(0, len(tokens), _TOKENS_PER_SLICE)]
        texts = (encode([tokenizer.token_piece(token) for token in part]) for part in parts)
        return b"".join(encode_streamed({
            "count": len(tokens),
            "max_model_len": service.client.ready.limits.max_model_len,
            "tokens": JsonStream(array(map(encode, parts))),
            "token_strs": JsonStream(array(texts)) if body.return_token_strs else None,
        }))

    return await service.threads.run(len(text), response, client_id)


async def _detokenized(service: Service, body: DetokenizeBody, client_id: str) -> bytes:
    """Return the response of /detokenize. Special tokens are part of the text."""
    tokenizer = _tokenizer(service)

    def response() -> bytes:
        tokens, vocab_size = check_token_ids("tokens", body.tokens), service.client.ready.vocab_size
        if max(tokens, default=0) >= vocab_size:
            refuse("tokens", max(tokens), f"token ids below the vocabulary size of {vocab_size}")
        return encode({"prompt": tokenizer.decode(tokens, skip_special_tokens=False)})

    return await service.threads.run(len(body.tokens) if isinstance(body.tokens, list) else 0, response, client_id)


def _tokenizer(service: Service) -> Tokenizer:
    if service.client.tokenizer is None:
        invalid("the model has no tokenizer", param="model")
    return service.client.tokenizer
