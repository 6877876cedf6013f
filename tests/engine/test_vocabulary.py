"""The bytes of a vocabulary reach the engine whole, from the server's process and from `LLM`."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM
from quire.core.frames import LENGTH_BYTES, frame
from quire.core.token_bytes import TokenBytes
from quire.engine.client import EngineClient
from quire.engine.launcher import EngineProcess, start_module
from quire.engine.messages import Located, Ready, Vocabulary, decode_command
from quire.engine.options import EngineOptions
from quire.scheduling.limits import AdmissionLimits
from quire.text.tokenizer import Tokenizer
from support.engine_process import Recorder

TOKENS = [b"a", b"", b"\xff\xfe", b"<|end|>", b""]


def test_each_token_has_its_bytes() -> None:
    table = TokenBytes.pack(TOKENS, frozenset({3}))
    assert [table[token_id] for token_id in range(len(table))] == TOKENS
    assert table.special_token_ids == {3}


@pytest.mark.parametrize("token_id", [-1, 5])
def test_ids_out_of_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(IndexError, match=f"token id {token_id} is out of a vocabulary of 5"):
        TokenBytes.pack(TOKENS, frozenset())[token_id]


def test_message_has_the_bytes_and_four_per_token() -> None:
    tokens = [b"%06d" % token_id for token_id in range(151_643)]
    message = frame(Vocabulary(TokenBytes.pack(tokens, frozenset({7}))))
    assert len(message) < len(tokens) * (6 + 4) + 64
    decoded = decode_command(message[LENGTH_BYTES:])
    assert isinstance(decoded, Vocabulary)
    assert [decoded.token_bytes[token_id] for token_id in range(len(tokens))] == tokens


def test_client_sends_the_vocabulary_once_and_only_when_asked(demo_model: Path, tmp_path: Path) -> None:
    ready = frame(Ready(AdmissionLimits(10, 16, 10, 160), 100, 100, frozenset(), "none", "none", 0, 0, 0))
    code = (
        "import socket, sys\n"
        "connection = socket.socket(fileno=int(sys.argv[1]))\n"
        f"connection.sendall({frame(Located(str(demo_model))) + ready!r})\n"
        f"open({str(tmp_path / 'sent')!r}, 'wb').write(connection.makefile('rb').read())\n"
    )

    def start(command: list[str], **settings: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, command[-1]], **settings)  # type: ignore[call-overload, no-any-return]

    async def run(num_calls: int) -> bytes:
        process = EngineProcess(*start_module("stand_in", start=start))
        client = await EngineClient.connect(process, EngineOptions(), Recorder())
        await asyncio.gather(*(client.send_vocabulary() for _ in range(num_calls)))
        await client._connection.drain()
        while client._connection._writer.transport.get_write_buffer_size():
            await asyncio.sleep(0.001)
        await client.close()
        return (tmp_path / "sent").read_bytes()

    table = Tokenizer.from_folder(demo_model).pack_token_bytes()
    assert table is not None
    assert asyncio.run(run(0)) == b""
    assert asyncio.run(run(3)) == frame(Vocabulary(table))


def test_llm_gives_the_vocabulary_to_its_engine(demo_model: Path) -> None:
    with LLM(demo_model, num_kv_blocks=8) as llm:
        table = llm._engine.engine.token_bytes()
        assert table is not None
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode("def f(x): return 'ü'", add_special_tokens=False)
        assert b"".join(table[token_id] for token_id in ids).decode() == "def f(x): return 'ü'"
