"""Route /invocations of SageMaker: a body goes to the route that its fields name, as if it had been sent there."""

from fastapi import APIRouter, Request, Response
from starlette.types import Message, Receive, Scope, Send

from quire.server.api.request_bodies import read_field_names
from quire.server.errors import invalid
from quire.server.service import Service

router = APIRouter()

# Routes by the first of these fields that a body has.
ROUTES = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "documents": "/rerank",
    "text_1": "/score",
    "queries": "/score",
    "input": "/v1/embeddings",
}
_OF_CHATS, _OF_EMBEDDINGS = ROUTES["messages"], ROUTES["input"]


class _Forwarded(Response):
    """The response of another route to a body that has been read."""

    def __init__(self, path: str, raw: bytes) -> None:
        super().__init__()
        self._path, self._raw = path, raw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the other route."""
        body: Message | None = {"type": "http.request", "body": self._raw, "more_body": False}

        async def receive_again() -> Message:
            nonlocal body
            message, body = body, None
            return await receive() if message is None else message

        self._raw = b""  # the route holds it as long as it needs it
        inner = {**scope, "path": self._path, "raw_path": self._path.encode()}
        await scope["app"].dispatch(inner, receive_again, send)


@router.post("/invocations", include_in_schema=False)
async def invoke(request: Request) -> Response:
    """Answer as the route does that requires a field of the body: messages, prompt and so on.

    An embedder embeds messages, as in vLLM.
    """
    raw, names = await read_field_names(request)
    served = request.app.openapi()["paths"]  # cached
    paths = {field: path for field, path in ROUTES.items() if path in served}
    path = next((path for field, path in paths.items() if field in names), None)
    service: Service = request.app.state.service
    pooler = service.client.ready.pooler
    if path == _OF_CHATS and pooler is not None and not pooler.is_reranker and _OF_EMBEDDINGS in served:
        path = _OF_EMBEDDINGS
    if path is None:
        invalid(f"the body must have one of the fields {', '.join(paths)}")
    return _Forwarded(path, raw)
