"""Every page in light and dark against the rules of axe-core, which `make browser` fetches; skipped without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.test_chat_page import ANSWERED, TEXTS, put, say
from e2e.test_debug_pages import in_browser
from support.browser import Page, chromium
from support.calling_model import CallingModel, write_calling_model
from support.clients import KEY, LIMIT_S
from support.server import ServerProcess, running_server

AXE = Path(__file__).parents[2] / ".cache/browser/node_modules/axe-core/axe.min.js"
HEADERS = {"Authorization": f"Bearer {KEY}"}
READY = {
    "/": "document.querySelector('#model').textContent === 'caller'",
    "/docs": "document.querySelectorAll('section.card').length > 10",
    "/debug/blocks": "document.querySelectorAll('#holders .swatch').length >= 2",
    "/debug/blocks/playground": "document.querySelectorAll('#grid .cell').length === 64",
    "/chat": "document.querySelector('#status').textContent === 'ready'",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    return write_calling_model(tmp_path_factory.mktemp("calling"), TEXTS, added=("<think>", "</think>"))


@pytest.fixture(scope="module")
def server(model: CallingModel) -> Iterator[ServerProcess]:
    chromium()
    if not AXE.exists():
        pytest.skip("axe-core is not here: make browser")
    flags = ("--served-model-name", "caller", "--api-key", KEY, "--enable-debug", "--num-kv-blocks", "1100")
    with running_server(str(model.folder), *flags) as running:
        yield running


async def violations(page: Page) -> list[str]:
    """Return each rule that the page breaks, with the first of its elements."""
    await page.evaluate(f"{AXE.read_text()}; true")
    result: dict[str, Any] = await page.evaluate("axe.run()")
    return [f"{each['id']}: {each['nodes'][0]['target']} {each['help']}" for each in result["violations"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", READY)
def test_page_breaks_no_rule(server: ServerProcess, model: CallingModel, path: str, scheme: str) -> None:
    body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 900, "ignore_eos": True, "stream": True}

    async def visit(page: Page) -> None:
        await page.prefer(scheme)
        await page.open(f"{server.url}/pages/pages.css")    # it asks for nothing
        await page.evaluate(f"localStorage.setItem('quire-key', '{KEY}')")
        async with (
            httpx.AsyncClient(headers=HEADERS, timeout=LIMIT_S) as client,
            client.stream("POST", f"{server.url}/v1/completions", json=body),
        ):
            await page.open(f"{server.url}{path}", password=None if path in ("/", "/chat") else KEY)
            await page.until(READY[path])
            if path == "/chat":
                await put(page, "#param-temperature", "0")
                await say(page, model.messages["markdown"][0]["content"])
                await page.until(ANSWERED)
            found = await violations(page)
        assert found == []

    in_browser(visit)
