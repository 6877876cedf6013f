"""A small server that speaks the hub's API, for the real huggingface_hub: listings, digests, ranges, and faults."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c" * 40
LFS = (".safetensors", ".gguf", ".bin")


@dataclass
class Repository:
    """A repository. `cuts`: bytes after which a transfer of a file breaks, and the hub is down until told otherwise."""

    files: dict[str, bytes]
    gguf: dict[str, object] | None = None
    cuts: dict[str, int] = field(default_factory=dict)
    is_down: bool = False
    told_digests: dict[str, str] = field(default_factory=dict)   # wrong ones

    def digest(self, name: str) -> str:
        content = self.files[name]
        if name.endswith(LFS):
            return self.told_digests.get(name) or hashlib.sha256(content).hexdigest()
        return self.told_digests.get(name) or hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def entry(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {"size": len(self.files[name])}
        if name.endswith(LFS):
            lfs = {"sha256": self.digest(name), "oid": self.digest(name), "size": found["size"], "pointerSize": 134}
            return found | {"blobId": "b" * 40, "oid": "b" * 40, "lfs": lfs}
        return found | {"blobId": self.digest(name), "oid": self.digest(name)}


class HubServer(ThreadingHTTPServer):
    """Repositories by id. Files in LFS are on another host, as on the hub: "localhost".

    `sent`: what was sent of which file, as (repository/file, first byte, number of bytes); `cdn_tokens`: Authorization
    headers of requests to the other host.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.sent: list[tuple[str, int, int]] = []
        self.cdn_tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, name: str, folder: Path | None = None, **files: bytes) -> Repository:
        """Add a repository with the files of a folder, and others."""
        found = {each.name: each.read_bytes() for each in sorted(folder.iterdir())} if folder is not None else {}
        self.repositories[name] = made = Repository(found | files)
        return made

    def names_sent(self) -> set[str]:
        return {name for name, _, num_bytes in self.sent if num_bytes}


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/\w+)?", path):
            self._json(found[1], self._info)
        elif found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/tree/\w+", path):
            self._json(found[1], self._tree)
        else:
            self._file(path)

    do_HEAD = do_GET

    def _json(self, name: str, make: Any) -> None:  # noqa: ANN401
        repository = self.server.repositories.get(name)
        if repository is None:
            self._refuse()
            return
        body = json.dumps(make(name, repository)).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _info(self, name: str, repository: Repository) -> dict[str, Any]:
        siblings = [{"rfilename": each} | repository.entry(each) for each in repository.files]
        return {"id": name, "sha": COMMIT, "siblings": siblings, "gguf": repository.gguf, "tags": [], "downloads": 0}

    def _tree(self, _: str, repository: Repository) -> list[dict[str, Any]]:
        return [{"type": "file", "path": each} | repository.entry(each) for each in repository.files]

    def _file(self, path: str) -> None:
        found = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/\w+/(.+)", path)
        repository = self.server.repositories.get(found[1]) if found else None
        if found is None or repository is None or found[2] not in repository.files:
            self._refuse()
            return
        if repository.is_down:
            self._head(503, {"Content-Length": "0"})
            return
        name, content = found[2], repository.files[found[2]]
        is_cdn = self.headers["Host"].startswith("localhost")
        if is_cdn:
            self.server.cdn_tokens.add(self.headers.get("Authorization"))
        elif name.endswith(LFS):
            self._redirect(path, repository, name)
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        head = {
            "Content-Length": str(len(content) - start), "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes",
            "ETag": f'"{repository.digest(name)}"', "X-Linked-Size": str(len(content)),
        }  # fmt: skip
        if start:
            head["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._head(206 if start else 200, head)
        if self.command == "HEAD":
            return
        num_bytes = repository.cuts.pop(name, len(content))
        repository.is_down = num_bytes < len(content)
        piece = content[start : start + num_bytes]
        self.server.sent.append((f"{found[1]}/{name}", start, len(piece)))
        self.wfile.write(piece)
        self.close_connection = start + len(piece) < len(content)

    def _redirect(self, path: str, repository: Repository, name: str) -> None:
        head = {
            "Location": f"http://localhost:{self.server.server_address[1]}{path}", "Content-Length": "0",
            "X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{repository.digest(name)}"',
            "X-Linked-Size": str(len(repository.files[name])),
        }  # fmt: skip
        self._head(302, head)

    def _refuse(self) -> None:
        self._head(404, {"X-Error-Code": "RepoNotFound", "Content-Length": "0"})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """Yield a server on a free port of this machine."""
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
