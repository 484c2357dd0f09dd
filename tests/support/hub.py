"""A model and dataset hub on loopback that speaks the public protocol of huggingface_hub, as far as downloads and uploads need it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

LARGE = (".safetensors", ".parquet", ".bin", ".gguf")
"""Ends of files that are stored by their sha256."""
_PATH = re.compile(
    r"/(?P<api>api/)?(?:(?P<kind>models|datasets)/)?(?P<repository>[^/]+/[^/]+)"
    r"(?:/(?P<verb>revision|tree|resolve)/(?P<revision>[^/]+)(?:/(?P<file>.+))?)?"
)


@dataclass
class Repository:
    """One repository: revisions by name, each with a commit and files."""

    revisions: dict[str, tuple[str, dict[str, bytes]]] = field(default_factory=dict)
    token: str | None = None
    """Token that a request must carry; None: public."""
    gated: bool = False

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        """Add a revision; return its commit."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.revisions[revision] = self.revisions[sha] = (sha, files)
        return sha


class LoopbackHub:
    """The hub: repositories by (kind, name), and a log of requests."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str] = set()
        self.writers: set[str] | None = None
        """Tokens that may upload; None: every request may."""
        self.private: dict[str, bool] = {}
        self.uploads: dict[str, bytes] = {}
        """Large files by their sha256."""
        self.url = ""

    def add(self, kind: str, name: str, files: dict[str, bytes], revision: str = "main") -> Repository:
        """Add a repository (kind "models" or "datasets"), or a revision of it."""
        repository = self.repositories.setdefault((kind, name), Repository())
        repository.commit(files, revision)
        return repository

    def add_folder(self, kind: str, name: str, folder: Path, **more: bytes) -> Repository:
        """Add a repository with the files of a folder."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.add(kind, name, {**files, **more})

    def downloads(self) -> list[str]:
        """Return the paths of all files that were downloaded."""
        return [path for method, path in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def serve_hub() -> Iterator[LoopbackHub]:
    """Serve an empty hub on a free port of loopback."""
    hub = LoopbackHub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and those it starts use the hub, with caches in ``folder``."""
    from huggingface_hub import constants

    cache = str(folder / "hf/hub")
    for name, value in {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_CACHE": cache,
        "HONE_CACHE": str(folder / "hone-cache"),
        "HF_HUB_DISABLE_XET": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


def parquet(rows: list[dict[str, object]]) -> bytes:
    """Return rows as the bytes of a parquet file."""
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.uploads[self.path.rpartition("/")[2]] = content
        self._send(200, b"", "text/plain", True, {})

    def do_POST(self) -> None:
        path, hub = urlsplit(self.path).path, self.hub
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(("POST", path))
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if hub.writers is not None and token not in hub.writers:
            return self._error(403, "Forbidden", True)
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []}, True)
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}"
            if ("models", name) in hub.repositories:
                known = {"error": "You already created this repo", "url": f"{hub.url}/{name}"}
                return self._send(409, json.dumps(known).encode(), "application/json", True, {})
            hub.add("models", name, {})
            hub.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            return self._json({"url": f"{hub.url}/{name}", "id": name}, True)
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**entry, "actions": {"upload": {"href": f"{hub.url}/lfs/{entry['oid']}", "header": {}}}}
                for entry in json.loads(content)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects}, True)
        name = "/".join(path.split("/")[3:5])
        if path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular"}
                for file in json.loads(content)["files"]
            ]
            return self._json({"files": [{**file, "shouldIgnore": False} for file in files]}, True)
        lines = [json.loads(line) for line in content.splitlines()]  # of /commit/main
        files = {one["value"]["path"]: self._content(one) for one in lines if one["key"] != "header"}
        sha = hub.add("models", name, files).revisions["main"][0]
        return self._json({"commitUrl": f"{hub.url}/{name}/commit/{sha}", "commitOid": sha, "hookOutput": ""}, True)

    def _content(self, line: dict[str, dict[str, str]]) -> bytes:
        value = line["value"]
        return base64.b64decode(value["content"]) if "content" in value else self.hub.uploads[value["oid"]]

    def _answer(self, *, body: bool) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path))
        match = _PATH.fullmatch(path)
        if match is None:
            return self._error(404, "EntryNotFound", body)
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if token:
            self.hub.tokens.add(token)
        kind = match["kind"] or "models"
        repository = self.hub.repositories.get((kind, match["repository"]))
        if repository is None or (repository.token and token != repository.token and not repository.gated):
            return self._error(401 if not token else 404, "RepoNotFound", body)
        if repository.gated and token != repository.token:
            return self._error(403, "GatedRepo", body)
        name = unquote(match["revision"] or "main")
        at = repository.revisions.get(name)
        if at is None:
            return self._error(404, "RevisionNotFound", body)
        commit, files = at
        if match["verb"] == "resolve":
            return self._file(commit, files, unquote(match["file"] or ""), body)
        if match["verb"] == "tree":
            return self._json([_entry(file, content) for file, content in sorted(files.items())], body)
        siblings = [{"rfilename": file} for file in sorted(files)]
        return self._json({"id": match["repository"], "sha": commit, "siblings": siblings, "private": False}, body)

    def _file(self, commit: str, files: dict[str, bytes], file: str, body: bool) -> None:
        if file not in files:
            return self._error(404, "EntryNotFound", body, {"X-Repo-Commit": commit})
        content = files[file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(file, content)}"', "Accept-Ranges": "bytes"}
        return self._send(200, content, "application/octet-stream", body, headers)

    def _json(self, value: object, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), "application/json", body, {})

    def _error(self, status: int, code: str, body: bool, headers: dict[str, str] | None = None) -> None:
        extra = {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})}
        self._send(status, json.dumps({"error": code}).encode(), "application/json", body, extra)

    def _send(self, status: int, content: bytes, kind: str, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _oid(file: str, content: bytes) -> str:
    if file.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(file: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": file, "size": len(content), "oid": _oid(file, content)}
    if len(_oid(file, content)) == 64:
        entry["lfs"] = {"oid": _oid(file, content), "size": len(content), "pointerSize": 134}
    return entry
