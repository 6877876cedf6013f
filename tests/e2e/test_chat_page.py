"""The start page and the chat in a real browser, over a real server with a key: written, pressed and read."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.test_debug_pages import in_browser
from support.browser import Page, chromium
from support.calling_model import WEATHER, CallingModel, call_text, write_calling_model
from support.clients import KEY
from support.server import ServerProcess, running_server

MARKDOWN = (
    "# Title\n\nSome **bold** and `code` <b>raw</b> <script>window.ran = 1</script>\n"
    '<img src="http://192.0.2.1/x" onerror="window.ran = 2"> [bad](javascript:window.ran=3)\n\n'
    "- one\n- two\n\n```python\nprint('<i>')\n```\n\n| a | b |\n| - | - |\n| 1 | 2 |\n"
)
LONG = "word " * 200
TEXTS = {
    "markdown": MARKDOWN, "call": call_text("get_weather", {"city": "Paris"}), "long": LONG,
    "thought": "<think>\nLet me see.\n</think>\n\nIt is done.",
}  # fmt: skip
ANSWERED = "document.querySelector('#status').textContent.startsWith('answered')"
LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    return write_calling_model(tmp_path_factory.mktemp("calling"), TEXTS, added=("<think>", "</think>"))


@pytest.fixture(scope="module")
def server(model: CallingModel) -> Iterator[ServerProcess]:
    chromium()
    with running_server(str(model.folder), "--served-model-name", "caller", "--api-key", KEY) as running:
        yield running


async def open_chat(page: Page, server: ServerProcess) -> None:
    """Open the chat, give it the key, and set greedy sampling."""
    await page.open(f"{server.url}/chat")
    await page.until("document.querySelector('#status').textContent.includes('needs a key')")
    await put(page, "#key", KEY)
    await page.until("document.querySelector('#status').textContent === 'ready'")
    await put(page, "#param-temperature", "0")
    page.complaints.clear()     # Chromium reports the 401


async def put(page: Page, field: str, text: str) -> None:
    element = f"document.querySelector({field!r})"
    await page.evaluate(f"{element}.value = {json.dumps(text)}; {element}.dispatchEvent(new Event('change'))")


async def say(page: Page, text: str) -> None:
    await put(page, "#prompt", text)
    await page.evaluate("document.querySelector('#prompt').focus()")
    await page.key("Enter", "\r")


async def count(page: Page, selector: str) -> int:
    return await page.evaluate(f"document.querySelectorAll({selector!r}).length")  # type: ignore[no-any-return]


async def press_button(page: Page, text: str) -> None:
    """Press the last button with a text."""
    found = f"[...document.querySelectorAll('button')].filter((each) => each.textContent === '{text}').at(-1)"
    await page.evaluate(f"{found}.click()")


def prompt_of(model: CallingModel, name: str) -> str:
    return model.messages[name][0]["content"]


def test_start_page_asks_for_the_key_and_shows_the_model(server: ServerProcess) -> None:
    async def visit(page: Page) -> None:
        await page.open(f"{server.url}/")
        await page.until("!document.querySelector('#key-form').hidden")
        await put(page, "#key", KEY)
        await page.press("#key-form button")
        await page.until("document.querySelector('#model').textContent === 'caller'")
        assert await page.text("#waiting") == "0"
        assert f"curl {server.url}/v1/chat/completions" in await page.text("#shell")
        assert KEY not in await page.text("#shell")
        page.complaints.clear()     # Chromium reports the 401

    in_browser(visit)


def test_answer_streams_is_drawn_as_markdown_and_never_as_html(server: ServerProcess, model: CallingModel) -> None:
    async def visit(page: Page) -> None:
        await open_chat(page, server)
        await say(page, prompt_of(model, "markdown"))
        await page.until(ANSWERED)
        assert await page.text(".assistant .text h3") == "Title"
        assert await page.text(".assistant .text strong") == "bold"
        assert await page.text(".assistant .code code") == "print('<i>')"
        assert await count(page, ".assistant .text li") == 2
        assert await count(page, ".assistant .text td") == 2
        assert "<script>window.ran = 1</script>" in await page.text(".assistant .text")
        assert await count(page, ".messages script, .messages img, .messages b") == 0
        assert await count(page, '.messages a:not([href^="http"])') == 0
        assert await page.evaluate("window.ran === undefined")
        figures = await page.text(".assistant .below .figure")
        assert all(part in figures for part in ("first token", "tokens/s", "cached", "new"))

    in_browser(visit)


def test_retry_is_a_branch_that_shares_its_prefix_and_a_reload_keeps_all(
    server: ServerProcess, model: CallingModel
) -> None:
    async def visit(page: Page) -> None:
        await open_chat(page, server)
        await say(page, prompt_of(model, "markdown"))
        await page.until(ANSWERED)
        await page.evaluate("document.querySelector('#status').textContent = ''")
        await press_button(page, "Retry")
        await page.until(ANSWERED)
        row = await page.text(".assistant .below")
        assert "branch 2 of 2" in row
        assert "shared with other branches" in row
        await page.press('.assistant [aria-label="branch before"]')
        assert "branch 1 of 2" in await page.text(".assistant .below")
        await page.call("Page.reload")
        await page.until("document.querySelectorAll('.assistant .text td').length === 2")
        assert "branch 1 of 2" in await page.text(".assistant .below")
        assert await page.evaluate("document.querySelector('#param-temperature').value") == "0"

    in_browser(visit)


def test_edit_is_a_branch_of_the_question(server: ServerProcess, model: CallingModel) -> None:
    async def visit(page: Page) -> None:
        await open_chat(page, server)
        await say(page, "something else")
        await page.until("document.querySelector('#send').hidden || document.querySelectorAll('.assistant').length")
        await page.key("Escape")
        await page.until("!document.querySelector('#send').hidden")
        await page.press(".user .below button")
        await put(page, "#editor", prompt_of(model, "markdown"))
        await press_button(page, "Send as a branch")
        await page.until("document.querySelectorAll('.assistant .text td').length === 2")
        assert "branch 2 of 2" in await page.text(".user .below")

    in_browser(visit)


def test_stop_keeps_what_was_written(server: ServerProcess, model: CallingModel) -> None:
    async def visit(page: Page) -> None:
        await open_chat(page, server)
        await say(page, prompt_of(model, "long"))
        await page.until(f"{LAST}?.querySelector('.text').textContent.includes('word')")
        await page.evaluate("document.querySelector('#stop').click()")
        await page.until("!document.querySelector('#send').hidden")
        assert (await page.text(".assistant .text")).startswith("word")

    in_browser(visit)


def test_reasoning_and_tool_calls_are_apart_from_the_answer(server: ServerProcess, model: CallingModel) -> None:
    async def visit(page: Page) -> None:
        await open_chat(page, server)
        await say(page, prompt_of(model, "thought"))
        await page.until(ANSWERED)
        assert (await page.text(".assistant .thinking div")).strip() == "Let me see."
        assert (await page.text(".assistant .text")).strip() == "It is done."
        await page.press("#new")
        await page.evaluate("document.querySelector('#status').textContent = ''")
        await put(page, "#tools", json.dumps([WEATHER]))
        await say(page, prompt_of(model, "call"))
        await page.until(ANSWERED)
        assert "get_weather" in await page.text(".assistant .tool")
        assert '"city": "Paris"' in await page.text(".assistant .tool pre")
        await press_button(page, "Answer the calls")
        assert await count(page, ".assistant .tool textarea") == 1

    in_browser(visit)


def test_pages_fit_a_phone(server: ServerProcess, tmp_path: Path) -> None:
    async def visit(page: Page) -> None:
        for path in ("/", "/chat"):
            await page.open(f"{server.url}{path}")
            await page.screenshot(tmp_path / "phone.png", "dark", (390, 844))
            assert await page.evaluate("document.documentElement.scrollWidth") == 390
        page.complaints.clear()     # Chromium reports the 401s

    in_browser(visit)
