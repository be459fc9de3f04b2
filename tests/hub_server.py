"""A model hub on this machine: what huggingface_hub asks of one, answered over HTTP from directories, with a log of all requests.

Repository information (commit and files), the tree, and files at a revision with ETag, commit, length and ranges; 404 for what does not exist, 401
for what is gated, in the hub's own error codes.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Commits with their files, and names for some of them."""

    commits: dict[str, dict[str, Path]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False


@dataclass
class Hub:
    """The hub's content, and every request that it got as `METHOD path`."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    html: bool = False
    """Answer everything with a web page, as a login page of a network does."""

    def publish(self, name: str, folder: Path, revision: str = "main", gated: bool = False) -> str:
        """Put a directory's files under a revision; returns the commit."""
        files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
        commit = hashlib.sha1("".join(f + etag(p) for f, p in files.items()).encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository(gated=gated))
        repository.commits[commit] = files
        repository.refs[revision] = commit
        return commit

    def downloaded(self) -> list[str]:
        """Names of files whose bytes were sent, in order."""
        return [m[3] for r in self.requests if r.startswith("GET ") and (m := _FILE.fullmatch(r.removeprefix("GET ")))]


def etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    """Answers for the hub that its server carries. HTTP/1.0: no connection outlives its answer, so a hub that is stopped is gone."""

    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.html:
            return self._send(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
        for pattern, answer in ((_TREE, self._tree), (_INFO, self._info), (_FILE, self._file)):
            found = pattern.fullmatch(path)
            if found:
                return answer(*found.groups())
        return self._send(404, b"", {})

    def _commit(self, name: str, revision: str | None) -> tuple[str, dict[str, Path]] | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        commit = repository.refs.get(revision or "main", revision or "")
        if commit not in repository.commits:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        return commit, repository.commits[commit]

    def _info(self, name: str, revision: str | None) -> None:
        if found := self._commit(name, revision):
            commit, files = found
            self._json({"id": name, "modelId": name, "sha": commit, "siblings": [{"rfilename": f} for f in files]})

    def _tree(self, name: str, revision: str) -> None:
        if found := self._commit(name, revision):
            self._json([{"type": "file", "path": f, "size": p.stat().st_size, "oid": etag(p)[:40]} for f, p in found[1].items()])

    def _file(self, name: str, revision: str, file: str) -> None:
        found = self._commit(name, revision)
        if found is None:
            return None
        commit, files = found
        if self.hub.repositories[name].gated:
            return self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {name} is restricted."})
        if file not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit})
        data, headers = files[file].read_bytes(), {"ETag": f'"{etag(files[file])}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self._send(200, data, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        return self._send(206, data[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def running(hub: Hub) -> Iterator[ThreadingHTTPServer]:
    """Serve on a free port until the end of the block; again under the same address if the hub had one."""
    server = ThreadingHTTPServer(("127.0.0.1", int(hub.url.rpartition(":")[2] or 0)), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
