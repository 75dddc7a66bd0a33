"""A small Hugging Face Hub on this machine: what huggingface_hub asks of the real one to download and to upload.

It listens on 127.0.0.1 only, keeps everything in memory, and refuses bodies above 64 MiB. Repositories have commits,
branches, private and gated access; weights are LFS files behind a redirect, all else lies in git.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LARGEST = 64 * 2**20
TOKEN = "hf_a_token_of_nobody"
LICENCES = ("apache-2.0", "mit", "cc-by-4.0", "other")
LFS = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")


@dataclass
class Repo:
    """A repository: its commits (all files of each), and the branches that point to them."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        before = self.commits.get(self.branches.get(branch, ""), {})
        oid = hashlib.sha1(repr((branch, len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[oid] = {**before, **files}
        self.branches[branch] = oid
        return oid

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Hub:
    """What the server knows, and what it was asked."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # LFS, by sha256
    moved: dict[str, str] = field(default_factory=dict)  # old names of repositories
    asked: list[str] = field(default_factory=list)
    broken: int = 0  # answer everything with this status
    hangs: float = 0.0  # seconds before every answer
    corrupt: bool = False  # flip a bit of every LFS file on its way

    def put(self, name: str, files: dict[str, bytes], branch: str = "main", **kind: bool) -> str:
        repo = self.repos.setdefault(name, Repo(**kind))
        self.objects |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        return repo.commit(files, branch)

    def questions(self, name: str) -> list[str]:
        """What was asked about a repository, once anything was: a client may give up before its question is read."""
        end = time.monotonic() + 60
        while not (found := [each for each in self.asked if f"/{name}" in each]) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        repo = self.repos[name]
        return repo.commits[repo.at(revision) or ""]


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    timeout = 20

    def log_message(self, format: str, *args: Any) -> None:
        return

    # Answers ------------------------------------------------------------------------------------------------

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.pop("Content_Length", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def tell(self, found: Any, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(found).encode(), Content_Type="application/json", **headers)

    def refuse(self, status: int, code: str, message: str = "") -> None:
        self.tell({"error": message or code}, status, X_Error_Code=code, X_Error_Message=message or code)

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
                assert len(data) <= LARGEST
            self.rfile.readline()
            return data
        length = int(self.headers.get("Content-Length", 0))
        assert length <= LARGEST
        return self.rfile.read(length)

    # Access -------------------------------------------------------------------------------------------------

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repo(self, name: str) -> Repo | None:
        """The repository, or None after the Hub's refusal: a stranger cannot tell private from missing."""
        repo = self.hub.repos.get(name)
        if self.headers.get("Authorization") and not self.known:
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and not self.known):
            self.refuse(404 if self.known else 401, "RepoNotFound", "Repository not found")
        elif repo.gated and not self.known:
            self.refuse(401, "GatedRepo", f"Access to model {name} is restricted")
        else:
            return repo
        return None

    # Requests -----------------------------------------------------------------------------------------------

    def handle_any(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.asked.append(f"{self.command} {unquote(path)}")
        data = self.body()
        time.sleep(hub.hangs)
        if hub.broken:
            self.tell({"error": "down"}, hub.broken)
            return
        for method, pattern, action in ROUTES:
            if re.fullmatch(method, self.command) and (found := re.fullmatch(pattern, path)):
                action(self, data, *map(unquote, found.groups()))
                return
        self.refuse(404, "", f"no such route: {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def resolve(self, data: bytes, name: str, revision: str, file: str) -> None:
        if name in self.hub.moved:
            self.answer(307, Location=f"/{self.hub.moved[name]}/resolve/{revision}/{file}")
            return
        if (repo := self.repo(name)) is None:
            return
        if (oid := repo.at(revision)) is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif file not in repo.commits[oid]:
            self.send_response(404)
            for key, value in (("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", oid), ("Content-Length", "0")):
                self.send_header(key, value)
            self.end_headers()
        elif file.endswith(LFS):
            found = repo.commits[oid][file]
            mark = hashlib.sha256(found).hexdigest()
            # Another host, as the real one has: the client does not follow there with its token.
            place = {
                "Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/cdn/{mark}",
                "X_Linked_Etag": f'"{mark}"',
            }
            self.answer(302, X_Repo_Commit=oid, X_Linked_Size=str(len(found)), ETag='"of the redirect"', **place)
        else:
            self.answer(200, repo.commits[oid][file], X_Repo_Commit=oid, ETag=f'"{git_id(repo.commits[oid][file])}"')

    def cdn(self, data: bytes, mark: str) -> None:
        found = bytearray(self.hub.objects[mark])
        if self.hub.corrupt:
            found[len(found) // 2] ^= 1
        self.answer(200, bytes(found), ETag=f'"{mark}"')

    def about(self, data: bytes, name: str, revision: str | None = None) -> None:
        if (repo := self.repo(name)) is None:
            return
        if (oid := repo.at(revision or "main")) is None and revision:
            self.refuse(404, "RevisionNotFound")
            return
        files = [{"rfilename": each} for each in repo.commits.get(oid or "", {})]
        self.tell({"id": name, "sha": oid, "private": repo.private, "siblings": files, "tags": []})

    def tree(self, data: bytes, name: str, revision: str) -> None:
        if (repo := self.repo(name)) is None:
            return
        rows = []
        for path, found in repo.commits[repo.at(revision) or ""].items():
            row: dict[str, Any] = {"type": "file", "path": path, "size": len(found), "oid": git_id(found)}
            if path.endswith(LFS):
                row["lfs"] = {"oid": hashlib.sha256(found).hexdigest(), "size": len(found), "pointerSize": 130}
            rows.append(row)
        self.tell(rows)

    def create(self, data: bytes) -> None:
        asked = json.loads(data)
        name = f"{asked['organization']}/{asked['name']}"
        if not self.known:
            self.refuse(401, "", "Invalid username or password.")
        elif asked["organization"] == "others":
            self.refuse(403, "", "You don't have the rights to create a model under the namespace 'others'")
        else:
            new = name not in self.hub.repos
            self.hub.repos.setdefault(name, Repo(private=asked.get("visibility") == "private"))
            self.tell({"url": f"{self.hub.url}/{name}", "name": name}, 200 if new else 409)

    def validate(self, data: bytes) -> None:
        text = json.loads(data)["content"]
        found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        try:
            told = yaml.safe_load(found[1]) if found else None
            assert isinstance(told, dict) and told["library_name"]
            assert told.get("license", "mit") in LICENCES, '"license" must be one of a list'
        except (yaml.YAMLError, AssertionError) as error:
            self.tell({"errors": [{"message": str(error)}], "warnings": []}, 400)
            return
        self.tell({"errors": [], "warnings": []})

    def preupload(self, data: bytes, name: str, revision: str) -> None:
        if not self.known:
            self.refuse(403, "", "no write access")
        elif self.repo(name) is not None:
            paths = [each["path"] for each in json.loads(data)["files"]]
            modes = {path: "lfs" if path.endswith(LFS) else "regular" for path in paths}
            self.tell({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})

    def batch(self, data: bytes, name: str) -> None:
        rows = []
        for each in json.loads(data)["objects"]:
            row = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.hub.objects:
                row["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}
                row["actions"]["verify"] = {"href": f"{self.hub.url}/verify"}
            rows.append(row)
        self.tell({"transfer": "basic", "objects": rows})

    def upload(self, data: bytes, mark: str) -> None:
        assert hashlib.sha256(data).hexdigest() == mark
        self.hub.objects[mark] = data
        self.answer(200)

    def verify(self, data: bytes) -> None:
        asked = json.loads(data)
        self.answer(200 if len(self.hub.objects[asked["oid"]]) == asked["size"] else 400)

    def commit(self, data: bytes, name: str, revision: str) -> None:
        repo, files = self.repo(name), {}
        if repo is None:
            return
        for line in map(json.loads, data.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        oid = repo.commit(files, revision)
        self.tell({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    ("GET|HEAD", r"/cdn/(\w+)", Handler.cdn),
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.validate),
    ("GET", rf"/api/models/{REPO}/tree/(.+)", Handler.tree),
    ("GET", rf"/api/models/{REPO}/revision/(.+)", Handler.about),
    ("GET", rf"/api/models/{REPO}", Handler.about),
    ("POST", rf"/api/models/{REPO}/preupload/(.+)", Handler.preupload),
    ("POST", rf"/api/models/{REPO}/commit/(.+)", Handler.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/lfs/(\w+)", Handler.upload),
    ("POST", r"/verify", Handler.verify),
    ("GET|HEAD", rf"/{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # of a client that gave up
            super().handle_error(request, client_address)


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub on a free port of this machine."""
    hub = Hub()
    server = Server(("127.0.0.1", 0), type("Own", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: Hub, home: Any, token: str = TOKEN) -> dict[str, str]:
    """The variables with which a process uses this Hub, and nothing of the user's own."""
    told = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return told | ({"HF_TOKEN": token} if token else {})
