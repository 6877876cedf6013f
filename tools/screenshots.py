"""Take the pictures of docs/images again, by make screenshots: a chat with an answer, and the live map under load.

    PYTHONPATH=tests python tools/screenshots.py FOLDER_OF_A_CHAT_MODEL

Needs Chromium. The model is served by its folder's name; the map shows the bundled demo model.
"""

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
from PIL import Image

from support.browser import Page, browsing
from support.server import ServerProcess, running_server

IMAGES = Path(__file__).parents[1] / "docs/images"
NAME = "SmolLM2-135M-Instruct"
QUESTION = "Write a Python function that returns the greatest common divisor of two numbers."
NUM_SEQUENCES = 30
NUM_TOKENS = 1300
NUM_COLOURS = 256


async def chat(server: ServerProcess, page: Page) -> None:
    """Ask a question, and again as a branch."""
    answered = "document.querySelector('#status').textContent.startsWith('answered')"
    await page.open(f"{server.url}/chat")
    await page.until("document.querySelector('#status').textContent === 'ready'")
    for field, text in (("#param-temperature", "0"), ("#param-max_tokens", "160"), ("#prompt", QUESTION)):
        element = f"document.querySelector({field!r})"
        await page.evaluate(f"{element}.value = {text!r}; {element}.dispatchEvent(new Event('change'))")
    await page.evaluate("document.querySelector('#prompt').focus()")
    await page.key("Enter", "\r")
    await page.until(answered)
    await page.evaluate("document.querySelector('#status').textContent = ''")
    retry = "[...document.querySelectorAll('button')].filter((each) => each.textContent === 'Retry').at(-1)"
    await page.evaluate(f"{retry}.click()")
    await page.until(answered)
    await save(page, "chat.png", (1200, 760))


async def live_map(server: ServerProcess, page: Page) -> None:
    """Run many sequences, of which some begin alike, and look while they run."""
    async with httpx.AsyncClient(timeout=None) as client, AsyncExitStack() as streams:
        for number in range(NUM_SEQUENCES):
            prompt = [5 + (number // 3 * 7 + place) % 90 for place in range(40 + 20 * (number % 5))]
            body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
            await streams.enter_async_context(client.stream("POST", f"{server.url}/v1/completions", json=body))
        await page.open(f"{server.url}/debug/blocks")
        await page.until("document.querySelectorAll('#holders .swatch').length > 20")
        await asyncio.sleep(12)     # a part of the charts' minute
        await save(page, "live-map.png", (1360, 1400))


async def save(page: Page, name: str, size: tuple[int, int]) -> None:
    """Save what a window shows, with few colours: a third of the bytes."""
    path = IMAGES / name
    await page.screenshot(path, size=size, is_whole=False)
    with Image.open(path) as image:
        image.convert("RGB").quantize(NUM_COLOURS).save(path, optimize=True)
    print(path)


async def run(model: str) -> None:
    with running_server(model, "--served-model-name", NAME, "--enable-debug") as server:
        async with browsing() as page:
            await chat(server, page)
    with running_server("--enable-debug") as server:
        async with browsing() as page:
            await live_map(server, page)


asyncio.run(run(sys.argv[1]))
