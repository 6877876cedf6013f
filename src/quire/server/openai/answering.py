"""Sends the answer to a call that runs, whole or as server-sent events, unless its client goes away.

A stream's status and headers are sent when its requests have been queued: what can be refused has been refused by
then, and clients with a time limit see that they are heard. What goes wrong later is the last event before the end.
"""

import logging

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.core.errors import EngineError
from quire.core.outputs import RequestOutput
from quire.server.errors import ApiError
from quire.server.open_answers import ClientGoneError
from quire.server.openai.answer_format import DONE, AnswerFormat, encode, event
from quire.server.openai.generation import Generation, usage_of
from quire.server.service import Service

log = logging.getLogger(__name__)


async def answer_to(
    request: Request, service: Service, generation: Generation, answer_format: AnswerFormat
) -> Response:
    """Return the answer: when all of it is there, or as a stream.

    EngineDeadError, ApiError or ClientGoneError when it cannot be whole.
    """
    call = answer_format.call
    if call.body.stream:
        return EventStream(service, generation, answer_format)
    try:
        outputs = await service.answers.run(generation.last_outputs(), request.receive)
    finally:
        generation.end()
    if call.params.logprobs is None and call.params.prompt_logprobs is None:
        return json_response(answer_format.answer(outputs, usage_of(generation.past)))
    # in a thread, for a million logprobs would hold up the event loop
    return json_response(await service.in_thread(0, lambda: answer_format.answer(outputs, usage_of(generation.past))))


def json_response(answer: object) -> Response:
    """Return an answer of JSON; bytes are JSON already."""
    return Response(answer if isinstance(answer, bytes) else encode(answer), media_type="application/json")


class EventStream(Response):
    """A stream of server-sent events: a send for each output that has something to show, and no task for any."""

    def __init__(self, service: Service, generation: Generation, answer_format: AnswerFormat) -> None:
        self.status_code, self.background = 200, None  # the base's constructor would announce an empty body
        self.init_headers({
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would hold events back
        })
        self._service, self._generation, self._format = service, generation, answer_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. An error ends it with an event of its own."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._service.answers.run(self._send_events(send), receive)
        except (ClientGoneError, OSError):
            log.debug("the client of a stream has gone")
        except Exception as error:
            if not isinstance(error, ApiError | EngineError):
                log.exception("a stream failed")
            await send(_body(event(self._service.told(error).body) + DONE, more_body=False))
        finally:
            self._generation.end()

    async def _send_events(self, send: Send) -> None:
        async def send_output(prompt_index: int, output: RequestOutput) -> None:
            chunks = self._format.chunks(prompt_index, output)
            if chunks:
                await send(_body(chunks))

        await self._generation.send_all(send_output)
        usage = self._format.usage_chunk(usage_of(self._generation.past)) if self._format.call.include_usage else b""
        await send(_body(usage + DONE, more_body=False))


def _body(body: bytes, *, more_body: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more_body}
