"""A metrics page on a port of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(page: str, status: int = 200, api_key: str | None = None) -> Iterator[str]:
    """Serve a page; yield the address before /metrics."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            has_key = api_key is None or self.headers["Authorization"] == f"Bearer {api_key}"
            self.send_response(status if has_key and self.path == "/metrics" else 401)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
