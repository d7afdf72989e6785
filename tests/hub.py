"""A stand-in of the Hugging Face hub on 127.0.0.1: models that are made, filled by commits, listed and fetched.

What huggingface_hub sends and expects is its own; here is what its client needs, kept in memory: repositories with
commits, large files put apart, and answers for a model that is gated, missing, or of somebody else.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

TOKEN = "hf_stand_in"


@dataclass
class Model:
    """Commits, the newest last: each its files by name."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], gone: set[str]) -> str:
        before = list(self.commits.values())[-1] if self.commits else {}
        whole = {name: content for name, content in before.items() if name not in gone} | files
        name = hashlib.sha1(repr(sorted((n, len(self.commits), c) for n, c in whole.items())).encode()).hexdigest()
        self.commits[name] = whole
        self.tags["main"] = name
        return name

    def at(self, revision: str) -> str | None:
        return self.tags.get(revision, revision if revision in self.commits else None)


class Hub(ThreadingHTTPServer):
    """Serves models; `asked` is what was asked for, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.models: dict[str, Model] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def hub() -> Iterator[Hub]:
    """One that runs meanwhile."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Answers(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self.answer(b"")

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    do_PUT = do_POST

    def answer(self, body: bytes) -> None:
        path = unquote(urlparse(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        for pattern, reply in ROUTES:
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                reply(self, body, **found.groupdict())
                return
        self.send(404, {"error": f"no route for {self.command} {path}"})

    def send(self, status: int, content: Any, **headers: str) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(raw))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def allowed(self) -> bool:
        """Whether who asks may write."""
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.send(401, {"error": "Invalid credentials"})
        return False

    def found(self, name: str, revision: str = "main") -> tuple[Model, str] | None:
        """The model and its commit; where there is none that is answered."""
        if name.endswith("/gated"):
            self.send(403, {"error": "gated"}, X_Error_Code="GatedRepo", X_Error_Message="gated")
            return None
        model = self.server.models.get(name)
        commit = None if model is None else model.at(revision)
        if model is None:
            self.send(404, {"error": "not found"}, X_Error_Code="RepoNotFound", X_Error_Message="not found")
        elif commit is None:
            self.send(404, {"error": "not found"}, X_Error_Code="RevisionNotFound", X_Error_Message="not found")
        return None if model is None or commit is None else (model, commit)


def create(request: Answers, body: bytes) -> None:
    if request.allowed():
        said = json.loads(body)
        name = f"{said.get('organization') or 'somebody'}/{said['name']}"
        there = name in request.server.models
        request.server.models.setdefault(name, Model()).tags.setdefault("main", "")
        place = f"{request.server.endpoint}/{name}"
        request.send(409 if there else 200, {"url": place, "name": name, "id": name})


def validate(request: Answers, body: bytes) -> None:
    request.send(200, {"errors": [], "warnings": []})


def preupload(request: Answers, body: bytes, name: str, revision: str) -> None:
    if request.allowed():
        files = json.loads(body)["files"]
        large = {one["path"]: one["path"].endswith((".safetensors", ".npz", ".png")) for one in files}
        modes = [
            {"path": path, "uploadMode": "lfs" if apart else "regular", "shouldIgnore": False}
            for path, apart in large.items()
        ]
        request.send(200, {"files": modes})


def batch(request: Answers, body: bytes, name: str) -> None:
    objects = [
        {
            "oid": one["oid"],
            "size": one["size"],
            "actions": {"upload": {"href": f"{request.server.endpoint}/large/{one['oid']}"}},
        }
        for one in json.loads(body)["objects"]
    ]
    request.send(200, {"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")


def put(request: Answers, body: bytes, digest: str) -> None:
    assert hashlib.sha256(body).hexdigest() == digest
    request.server.large[digest] = body
    request.send(200, {})


def commit(request: Answers, body: bytes, name: str, revision: str) -> None:
    if request.allowed():
        files, gone = {}, set()
        for line in map(json.loads, body.splitlines()):
            said = line["value"]
            if line["key"] == "file":
                files[said["path"]] = base64.b64decode(said["content"])
            elif line["key"] == "lfsFile":
                files[said["path"]] = request.server.large[said["oid"]]
            elif line["key"] == "deletedFile":
                gone.add(said["path"])
        made = request.server.models[name].commit(files, gone)
        place = f"{request.server.endpoint}/{name}/commit/{made}"
        request.send(200, {"success": True, "commitOid": made, "commitUrl": place, "hookOutput": ""})


def info(request: Answers, body: bytes, name: str, revision: str = "main") -> None:
    if (found := request.found(name, revision)) is not None:
        model, at = found
        siblings = [{"rfilename": file} for file in model.commits.get(at, {})]
        said = {"id": name, "modelId": name, "sha": at, "siblings": siblings, "private": False, "tags": []}
        request.send(200, said | {"downloads": 0, "likes": 0})


def tree(request: Answers, body: bytes, name: str, revision: str) -> None:
    if (found := request.found(name, revision)) is not None:
        model, at = found
        listed = [
            {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for file, content in model.commits.get(at, {}).items()
        ]
        request.send(200, listed)


def resolve(request: Answers, body: bytes, name: str, revision: str, file: str) -> None:
    if (found := request.found(name, revision)) is not None:
        model, at = found
        content = model.commits[at].get(file)
        if content is None:
            request.send(404, {"error": "no entry"}, X_Error_Code="EntryNotFound", X_Repo_Commit=at)
            return
        tag = hashlib.sha256(content).hexdigest()
        request.send(200, content, ETag=f'"{tag}"', X_Repo_Commit=at, Content_Type="application/octet-stream")


ROUTES = (
    (r"POST /api/validate-yaml", validate),
    (r"POST /api/repos/create", create),
    (r"POST /api/models/(?P<name>[^/]+/[^/]+)/preupload/(?P<revision>.+)", preupload),
    (r"POST /(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", batch),
    (r"PUT /large/(?P<digest>\w+)", put),
    (r"POST /api/models/(?P<name>[^/]+/[^/]+)/commit/(?P<revision>.+)", commit),
    (r"GET /api/models/(?P<name>[^/]+/[^/]+)/revision/(?P<revision>.+)", info),
    (r"GET /api/models/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)", tree),
    (r"GET /api/models/(?P<name>[^/]+/[^/]+)", info),
    (r"(?:GET|HEAD) /(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", resolve),
)
