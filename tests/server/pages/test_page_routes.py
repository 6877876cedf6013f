"""The start page, the chat and the files of all pages: open, without data, and with nothing from other hosts."""

import os
import signal
from pathlib import Path

import httpx
import pytest

import quire
from quire.engine.options import EngineOptions
from quire.server.pages.page_routes import FILES
from support.http_app import ask, make_app
from support.openai_server import NAME, openai_server

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
ASSETS = tuple(f"/pages/{path.name}" for path in FILES.iterdir() if path.suffix in {".js", ".css"})
PAGES = ("/", "/chat", "/debug/blocks", "/debug/blocks/playground")
MAX_BYTES = 150_000


def get(url: str, **options: object) -> httpx.Response:
    return ask(make_app(**options), "GET", url, headers=HTML)


def test_start_is_a_page_for_browsers_and_links_for_other_clients() -> None:
    app = make_app()
    page = ask(app, "GET", "/", headers=HTML)
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    answer = ask(app, "GET", "/", headers={"Accept": "*/*"})
    assert answer.headers["Vary"] == page.headers["Vary"] == "Accept"
    known = ask(app, "GET", "/openapi.json").json()["paths"].keys() | {"/chat", "/docs", "/openapi.json"}
    assert set(answer.json()["links"].values()) <= known


@pytest.mark.parametrize("url", ["/", "/chat", *ASSETS])
def test_pages_hold_no_data_and_need_no_key(url: str) -> None:
    assert get(url, api_key=("key",)).text == get(url).text


@pytest.mark.parametrize("url", ["/status", "/pages", "/chat/", "/%70ages/dom.js"])
def test_all_else_needs_a_key(url: str) -> None:
    assert get(url, api_key=("key",)).status_code == 401


@pytest.mark.parametrize("url", [*PAGES, *ASSETS])
def test_pages_may_run_and_load_their_own_files_only(url: str) -> None:
    response = get(url, enable_debug=True)
    assert response.status_code == 200
    kind = {"js": "text/javascript", "css": "text/css"}.get(url.rpartition(".")[2], "text/html")
    assert response.headers["Content-Type"] == f"{kind}; charset=utf-8"
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert 'src="http' not in response.text
    assert 'href="http' not in response.text


def test_scripts_never_write_html() -> None:
    for path in FILES.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(") if word in text]


def test_all_pages_together_are_small() -> None:
    assert sum(path.stat().st_size for path in FILES.iterdir()) < MAX_BYTES


@pytest.mark.parametrize("name", ["live.html", "missing.js", "..%2fpage_routes.py", "../page_routes.py", ".", ""])
def test_nothing_but_scripts_and_styles_are_files_of_the_pages(name: str) -> None:
    response = get(f"/pages/{name}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")


def test_status_tells_the_model_and_what_the_engine_holds(demo_model: Path) -> None:
    engine = EngineOptions(
        model=str(demo_model), max_model_len=128, num_kv_blocks=64, override_generation_config='{"temperature": 0.5}'
    )
    with openai_server(engine) as server:
        server.ask("/v1/completions", prompt=[1] * 40, max_tokens=2)
        told = server.http.get("/status").json()
        assert (told["models"], told["version"], told["problem"]) == ([NAME], quire.__version__, None)
        assert (told["max_model_len"], told["num_blocks"], told["block_size"]) == (128, 64, 16)
        assert told["sampling"]["temperature"] == 0.5
        assert (told["num_running"], told["num_waiting"], told["num_used_blocks"]) == (0, 0, 0)
        assert told["num_cached_blocks"] == 2


def test_status_tells_why_the_engine_does_not_serve(demo_model: Path) -> None:
    with openai_server(EngineOptions(model=str(demo_model), max_model_len=64, num_kv_blocks=16)) as server:
        os.kill(server.child.process.pid, signal.SIGKILL)
        server.wait_until(lambda: not server.service.client.is_alive)
        assert "engine" in server.http.get("/status").json()["problem"]
