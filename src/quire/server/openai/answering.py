"""Sends the answer to a call that runs, whole or as server-sent events, unless its client goes away.

A stream's status and headers are sent when its requests have been queued: what can be refused has been refused by
then, and clients with a time limit see that they are heard. What goes wrong later is the last event before the end.
"""

import asyncio
import logging

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.core.errors import EngineError
from quire.core.outputs import RequestOutput
from quire.server.errors import ApiError, as_api_error
from quire.server.open_answers import ClientGoneError, OpenAnswers
from quire.server.openai.answer_format import DONE, AnswerFormat, encode
from quire.server.openai.generation import Generation
from quire.server.service import Service

log = logging.getLogger(__name__)


async def whole_answer(
    request: Request, service: Service, generation: Generation, answer_format: AnswerFormat
) -> Response:
    """Return the answer when all of it is there. EngineDeadError, ApiError or ClientGoneError when it cannot be."""
    try:
        outputs = await service.answers.run(generation.last_outputs(), request.receive)
    finally:
        generation.end()
    params, usage = answer_format.call.params, generation.tally.usage()
    if params.logprobs is None and params.prompt_logprobs is None:
        return json_response(answer_format.answer(outputs, usage))
    loop = asyncio.get_running_loop()  # which a million logprobs would hold up
    return json_response(await loop.run_in_executor(service.threads, answer_format.answer, outputs, usage))


def json_response(body: bytes) -> Response:
    """Return an answer of JSON that has been encoded."""
    return Response(body, media_type="application/json")


class EventStream(Response):
    """A stream of server-sent events: a send for each output that has something to show, and no task for any."""

    def __init__(self, answers: OpenAnswers, generation: Generation, answer_format: AnswerFormat) -> None:
        self.status_code, self.background = 200, None  # the base's constructor would announce an empty body
        self.init_headers({
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would hold events back
        })
        self._answers, self._generation, self._format = answers, generation, answer_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. An error ends it with an event of its own."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._answers.run(self._send_events(send), receive)
        except (ClientGoneError, OSError):
            log.debug("the client of a stream has gone")
        except Exception as error:
            if not isinstance(error, ApiError | EngineError):
                log.exception("a stream failed")
            await send(_body(_event(as_api_error(error).body) + DONE, more_body=False))
        finally:
            self._generation.end()

    async def _send_events(self, send: Send) -> None:
        async def send_output(prompt_index: int, output: RequestOutput) -> None:
            chunks = self._format.chunks(prompt_index, output)
            if chunks:
                await send(_body(chunks))

        await self._generation.send_all(send_output)
        usage = self._format.usage_chunk(self._generation.tally.usage()) if self._format.call.include_usage else b""
        await send(_body(usage + DONE, more_body=False))


def _event(message: object) -> bytes:
    return b"data: " + encode(message) + b"\n\n"


def _body(body: bytes, *, more_body: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more_body}
