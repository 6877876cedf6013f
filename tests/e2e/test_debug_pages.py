"""The pages in a real browser, over a real server with a key: pressed and read as a person does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.browser import Page, browsing, chromium
from support.clients import KEY, LIMIT_S
from support.server import ServerProcess, running_server

HEADERS = {"Authorization": f"Bearer {KEY}"}
FLAGS = (
    "--enable-debug", "--api-key", KEY, "--block-size", "8", "--num-kv-blocks", "1100",
    "--num-swap-blocks", "1200", "--preemption-mode", "swap", "--max-num-batched-tokens", "256",
)  # fmt: skip
PREFIX = [5 + number % 50 for number in range(64)]


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[ServerProcess]:
    chromium()
    with running_server(str(demo_model), *FLAGS) as running:
        yield running


def in_browser(visit: Callable[[Page], Awaitable[None]]) -> None:
    """Run a visit in a browser of its own; pages must complain of nothing, and ask nothing of another host."""

    async def run() -> None:
        async with browsing() as page:
            await visit(page)
            assert page.complaints == []
            assert page.asked == page.opened

    asyncio.run(run())


@asynccontextmanager
async def generating(url: str, body: dict[str, Any]) -> AsyncIterator[None]:
    """Send a request again and again, however slow the page is."""

    async def generate() -> None:
        async with httpx.AsyncClient(headers=HEADERS, timeout=LIMIT_S) as client:
            while True:
                (await client.post(url, json=body)).raise_for_status()

    task = asyncio.create_task(generate())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def figures(page: Page) -> tuple[int, ...]:
    return tuple([int(await page.text(f"#{name}")) for name in ("free", "used", "shared", "sequences", "copies")])


async def tables(page: Page) -> dict[str, str]:
    """Return the block tables that the page shows, by the names of their sequences."""
    row = "[row.querySelector('.name').textContent, row.dataset.table]"
    rows = f"[...document.querySelectorAll('#tables .table')].map((row) => {row})"
    return dict(await page.evaluate(rows))


async def act(page: Page, button: str, expected: tuple[int, ...], then: str = "true") -> None:
    """Press a button, wait for what it does to the log, and compare the figures."""
    before = await page.evaluate("document.querySelectorAll('#log li').length")
    await page.press(button)
    await page.until(f"document.querySelectorAll('#log li').length === {before + 1} && {then}")
    assert await figures(page) == expected


def test_playground_shows_the_worked_example_t6(server: ServerProcess) -> None:
    async def visit(page: Page) -> None:
        await page.open(f"{server.url}/debug/blocks/playground", password=KEY)
        await page.until("document.querySelectorAll('#grid .cell').length === 64")
        assert await figures(page) == (64, 0, 0, 0, 0)
        await act(page, "#new", (64, 0, 0, 1, 0))
        await page.evaluate("document.querySelector('#count').value = 64")
        await act(page, "#append", (60, 4, 0, 1, 0))
        assert await tables(page) == {"A": "0,1,2,3"}
        for num_sequences in (2, 3, 4):
            await act(page, "#fork", (60, 4, 4, num_sequences, 0))
        assert await tables(page) == dict.fromkeys("ABCD", "0,1,2,3")
        counts = "[...document.querySelectorAll('#grid .cell b')].map((count) => count.textContent)"
        assert await page.evaluate(counts) == ["4", "4", "4", "4"]
        await page.evaluate("document.querySelector('#count').value = 10")
        for number, name in enumerate("ABCD"):
            await page.evaluate(f"document.querySelectorAll('#tables .table')[{number}].click()")
            assert await page.text("#target") == name
            await act(page, "#append", (59 - number, 5 + number, 4, 4, 0))
        assert await figures(page) == (56, 8, 4, 4, 0)
        assert await tables(page) == {name: f"0,1,2,3,{4 + number}" for number, name in enumerate("ABCD")}
        assert await page.text("#unshared") == "20"
        for num_left in (3, 2, 1, 0):
            await page.press("#free-sequence")
            await page.until(f"document.querySelector('#sequences').textContent === '{num_left}'")
        assert await figures(page) == (64, 0, 0, 0, 0)

    in_browser(visit)


def test_playground_copies_on_write_and_takes_steps_back(server: ServerProcess) -> None:
    async def visit(page: Page) -> None:
        await page.open(f"{server.url}/debug/blocks/playground", password=KEY)
        await page.until("document.querySelectorAll('#grid .cell').length === 64")
        await act(page, "#new", (64, 0, 0, 1, 0))
        await page.evaluate("document.querySelector('#count').value = 20")
        await act(page, "#append", (62, 2, 0, 1, 0))
        await act(page, "#fork", (62, 2, 2, 2, 0))
        await act(page, "#write", (61, 3, 1, 2, 1))
        assert await page.text("#log li span") == "block 1 was shared: copied to 2 before the write"
        await page.evaluate("document.querySelector('#tables [role=radio]').focus()")
        await page.key("ArrowDown")
        assert await page.text("#target") == "B"
        await act(page, "#write", (61, 3, 1, 2, 1))
        await page.press("#undo")
        await page.press("#undo")
        await page.until("document.querySelector('#copies').textContent === '0'")
        await page.press("#reset")
        await page.until("document.querySelector('#free').textContent === '64'")
        assert await page.evaluate("document.querySelector('#on-sequence').disabled")

    in_browser(visit)


def test_live_map_follows_running_requests(server: ServerProcess) -> None:
    body = {"prompt": PREFIX, "n": 4, "max_tokens": 1500, "ignore_eos": True, "stream": True}

    async def visit(page: Page) -> None:
        url = f"{server.url}/v1/completions"
        async with httpx.AsyncClient(headers=HEADERS, timeout=LIMIT_S) as client:
            async with client.stream("POST", url, json=body) as stream:
                assert stream.status_code == 200
                await page.open(f"{server.url}/debug/blocks", password=KEY)
                await page.until("document.querySelectorAll('#holders .swatch').length === 4")
                assert await page.evaluate("document.querySelectorAll('#grid .cell').length") == 1024
                assert await page.text("#shared") == "8"
                corners = "[...document.querySelectorAll('#grid .cell b')].map((count) => count.textContent)"
                assert await page.evaluate(corners) == ["4"] * 8
                assert await page.evaluate("document.querySelectorAll('#grid .cell i').length") >= 20
                assert await page.text("#owners dt") == "key-1"
                await page.evaluate("document.querySelector('#grid').focus()")
                await page.key("ArrowRight")
                assert await page.text("#chosen") == "1"
                await page.until("document.querySelectorAll('#detail .swatch').length === 4")
                await page.press("#next")
                await page.until("document.querySelectorAll('#grid .cell').length === 1100 - 1024")
                await page.press("#previous")
            await page.until("document.querySelector('#used').textContent === '0'")
            await page.until("document.querySelectorAll('#grid .cell.cached').length >= 4")
            assert await page.text("#status") == "live"

    in_browser(visit)


def test_charts_show_the_steps_and_the_slider_goes_back_in_time(server: ServerProcess) -> None:
    body = {"prompt": PREFIX, "max_tokens": 40, "ignore_eos": True}
    drawn = (
        "(() => { const chart = document.querySelector('#chart'); const { width, height } = chart; "
        "return width && chart.getContext('2d').getImageData(0, 0, width, height).data.some((each) => each); })()"
    )
    figures = "[...document.querySelectorAll('#moment-figures dd')].map((each) => each.textContent)"

    async def visit(page: Page) -> None:
        httpx.post(f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=LIMIT_S).raise_for_status()
        steps = httpx.get(f"{server.url}/debug/top", headers=HEADERS, timeout=LIMIT_S).json()["engines"][0]["steps"]
        await page.open(f"{server.url}/debug/blocks", password=KEY)
        await page.until("document.querySelector('#moment-step').textContent.startsWith('step')")
        await page.press("#pause")
        assert await page.evaluate(drawn)
        assert await page.text("#moment-when") == "now"
        await page.evaluate("document.querySelector('#moment').focus()")
        for num_back in (1, 2, 3):
            await page.key("ArrowLeft")
            assert (await page.text("#moment-step")).startswith(f"step {steps['number'][-num_back]:,}: decode, ")
        assert "s ago, at" in await page.text("#moment-when")
        free, cached, used = (steps[name][-3] for name in ("free", "cached", "used"))
        assert (await page.evaluate(figures))[:3] == [f"{used:,}", f"{cached:,}", f"{free:,}"]
        told = await page.evaluate("document.querySelector('#moment').getAttribute('aria-valuetext')")
        assert f"blocks used {used:,}" in told
        await page.press("#to-now")
        assert await page.text("#moment-when") == "now"

    in_browser(visit)


def test_map_of_a_step_of_the_past_is_shown_again(server: ServerProcess) -> None:
    body = {"prompt": PREFIX, "n": 4, "max_tokens": 1500, "ignore_eos": True}

    async def visit(page: Page) -> None:
        url = f"{server.url}/v1/completions"
        httpx.post(url, json=body | {"n": 1, "max_tokens": 4}, headers=HEADERS, timeout=LIMIT_S)
        await page.open(f"{server.url}/debug/blocks", password=KEY)
        async with generating(url, body):
            await page.until("document.querySelectorAll('#holders .swatch').length === 4")
            await page.until("document.querySelector('#moment-step').textContent.includes('4 sequences')")
            told = await page.text("#moment-step")      # steps that come later have a map before them
            await page.until(f"document.querySelector('#moment-step').textContent !== {told!r}")
        await page.until("document.querySelector('#used').textContent === '0'")
        assert await page.text("#map-hint") == ""
        found = (
            "(() => { for (let step = Number(moment.max) - 1; step > 0; step -= 1) { moment.value = step; "
            "moment.dispatchEvent(new Event('input')); "
            "if (document.querySelectorAll('#holders .swatch').length === 4) return true; } })()"
        )
        assert await page.evaluate(found)
        assert (await page.text("#map-hint")).startswith("As it was ")
        assert int(await page.text("#used")) > 8
        assert await page.evaluate("document.querySelectorAll('#grid .cell.used').length >= 8")
        await page.evaluate("(({ min }) => { moment.value = min; moment.dispatchEvent(new Event('input')); })(moment)")
        assert (await page.text("#map-hint")).startswith("No map of that moment: this is the map of now.")
        await page.press("#to-now")
        await page.until("document.querySelector('#used').textContent === '0'")
        assert await page.text("#map-hint") == ""

    in_browser(visit)


def test_charts_are_for_the_operator_alone_where_there_is_one(demo_model: Path) -> None:
    async def visit(page: Page) -> None:
        await page.open(f"{server.url}/debug/blocks", password=KEY)
        await page.until("document.querySelector('#charts-hint').textContent.includes('operator')")
        await page.until("document.querySelector('#status').textContent === 'live'")
        assert await page.evaluate("document.querySelector('#charts-body').hidden")
        page.complaints.clear()     # Chromium reports the 403

    chromium()
    with running_server(str(demo_model), *FLAGS, "--operator-api-key", "operator-key") as server:
        in_browser(visit)


def test_overview_turns_to_another_part_and_follow_comes_back(demo_model: Path) -> None:
    mark = (
        "(() => { const holder = document.querySelector('#holders button'); "
        "if (holder?.ariaPressed === 'false') holder.click(); "
        "return holder?.ariaPressed === 'true' && document.querySelector('#grid.marking .cell.marked') !== null; })()"
    )

    async def visit(page: Page) -> None:
        await page.open(f"{server.url}/debug/blocks", password=KEY)
        body = {"prompt": PREFIX, "max_tokens": 1900, "ignore_eos": True}
        async with generating(f"{server.url}/v1/completions", body):
            await page.until("document.querySelectorAll('#overview i.used').length > 0")
            await page.evaluate("document.querySelector('#window').focus()")
            await page.key("ArrowRight")
            await page.until("document.querySelector('#range').textContent === '1,024 to 1,099 of 1,100'")
            assert await page.evaluate("document.querySelector('#follow').ariaPressed") == "false"
            await page.press("#follow")
            await page.until("document.querySelector('#range').textContent === '0 to 1,023 of 1,100'")
            await page.until(mark)      # at once, while the holder is there

    chromium()
    with running_server(str(demo_model), *FLAGS) as server:  # its first blocks are free
        in_browser(visit)


def test_live_map_shows_who_is_swapped_out(server: ServerProcess) -> None:
    prompts = [[5 + number] * 1400 for number in range(6)]  # 175 blocks each
    body = {"prompt": prompts, "n": 4, "max_tokens": 500, "ignore_eos": True, "stream": True}

    async def visit(page: Page) -> None:
        url = f"{server.url}/v1/completions"
        async with httpx.AsyncClient(headers=HEADERS, timeout=LIMIT_S) as client:
            async with client.stream("POST", url, json=body) as stream:
                assert stream.status_code == 200
                await page.open(f"{server.url}/debug/blocks", password=KEY)
                # The figure and the grid are of different steps, and the next map may show none: pause at once.
                await page.until(
                    "document.querySelectorAll('#swap-grid .cell.used').length > 175 && "
                    "Number(document.querySelector('#swap-used').textContent) > 175 && "
                    "(document.querySelector('#pause').click(), true)"
                )
                assert await page.evaluate("document.querySelectorAll('#swap-grid .cell').length") == 1024
                rows = "[...document.querySelectorAll('#holders .figure')].map((row) => row.textContent)"
                assert sum("swapped out" in row for row in await page.evaluate(rows)) in {4, 8, 12}
                assert int(await page.text("#swap-used")) > 175
                assert await page.evaluate("document.querySelectorAll('#swap-grid .cell b').length") >= 175
                await page.evaluate("document.querySelector('#swap-grid').focus()")
                assert await page.text("#chosen") == "0 of the swap space"
                await page.key("ArrowRight")
                assert await page.text("#chosen") == "1 of the swap space"
                await page.press("#swap-next")
                await page.until("document.querySelectorAll('#swap-grid .cell').length === 1200 - 1024")
                assert await page.evaluate("document.querySelectorAll('#grid .cell').length") == 1024
            await page.press("#pause")
            await page.until("document.querySelector('#used').textContent === '0'")
            await page.until("document.querySelector('#swap-used').textContent === '0'")

    in_browser(visit)
