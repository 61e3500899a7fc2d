"""A hub on this machine: folders served by HTTP as huggingface_hub and datasets ask the real one."""

import hashlib
import json
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

# what lies in git LFS on the hub
LARGE = (".safetensors", ".parquet", ".arrow", ".tar", ".zip", ".png", ".jpg")
CONVERTER = "SFconvertbot"
TOKEN = "hf_of_a_rehearsal"
_API = re.compile(
    r"/api/(models|datasets|spaces)/([^/]+/[^/]+)"
    r"(?:/(revision|tree|paths-info|discussions)(?:/([^/]+)(?:/(.+))?)?)?"
)
_FILE = re.compile(r"/(datasets/|spaces/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Stored:
    """One file of a commit, with the ids that git and git LFS give it."""

    def __init__(self, path: Path, name: str):
        content = path.read_bytes()
        self.path, self.name, self.size = path, name, len(content)
        self.blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        self.sha256 = hashlib.sha256(content).hexdigest() if name.endswith(LARGE) else None

    def entry(self) -> dict:
        entry = {"type": "file", "path": self.name, "size": self.size, "oid": self.blob}
        if self.sha256:
            entry["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 130}
        return entry


class Commit:
    """A folder as it is now; its id follows from names and contents."""

    def __init__(self, repository: str, folder: Path):
        names = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]
        self.files = {name: Stored(folder / name, name) for name in names}
        listed = "".join(f"{name} {file.blob}\n" for name, file in self.files.items())
        self.id = hashlib.sha1(f"{repository}\n{listed}".encode()).hexdigest()
        folders = {str(parent) for name in names for parent in PurePosixPath(name).parents} - {"."}
        empty = {"type": "directory", "size": 0, "oid": "0" * 40}
        self.tree = {name: {"path": name, **empty} for name in sorted(folders)}
        self.tree |= {name: file.entry() for name, file in self.files.items()}

    def below(self, folder: str, recursive: bool) -> list[dict]:
        """Return what lies in a folder, '' for the uppermost, or at any depth below it."""
        start = folder and f"{folder}/"
        inside = {path: entry for path, entry in self.tree.items() if path.startswith(start)}
        direct = {p for p in inside if str(PurePosixPath(p).parent) == (folder or ".")}
        return [entry for path, entry in inside.items() if recursive or path in direct]


class HubServer:
    """Serves repositories on 127.0.0.1 for the time of a `with`.

    repositories: "owner/model", "datasets/owner/name" or "spaces/owner/name" -> its folder, or
        {revision: folder}; refs/pr/N is also a pull request of the hub's safetensors converter.
    gated: repositories refused without TOKEN.   cuts: file name -> the byte that is the last sent.
    seen: every request: "GET /path?query", with the range of bytes asked for.
    """

    def __init__(
        self, repositories: Mapping[str, Path | Mapping[str, Path]], gated: Collection[str] = ()
    ):
        self.repositories: dict[str, dict[str, Commit]] = {}
        for name, at in repositories.items():
            revisions = {"main": at} if isinstance(at, Path) else at
            self.repositories[name] = {rev: Commit(name, path) for rev, path in revisions.items()}
        self.gated = frozenset(gated)
        self.cuts: dict[str, int] = {}
        self.seen: list[str] = []
        handler = type("Bound", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def commit(self, repository: str, revision: str = "main") -> str:
        return self.repositories[repository][revision].id

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables that make this server the hub of a new process, with a cache."""
        found = {"HF_ENDPOINT": self.url, "HF_HOME": str(home)}
        return found | {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def __enter__(self) -> "HubServer":
        how = {"kwargs": {"poll_interval": 0.02}, "daemon": True}
        threading.Thread(target=self._server.serve_forever, **how).start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuses every connection from now on."""
        self._server.shutdown()
        self._server.server_close()


class Refused(Exception):
    """An answer other than 200, with the code that the hub's client reads."""

    def __init__(self, status: int, code: str, commit: Commit | None = None):
        self.status, self.content = status, {"error": code}
        self.headers = {"X-Error-Code": code, "X-Error-Message": code}
        if commit:
            self.headers["X-Repo-Commit"] = commit.id


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with it, so that none is left when the server stops."""

    hub: HubServer

    def do_GET(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        ranges = self.headers.get_all("Range", [])
        self.hub.seen.append(" ".join([self.command, self.path, *ranges]))
        url = urlsplit(self.path)
        try:
            if url.path == "/api/whoami-v2":
                if not self.logged_in:
                    raise Refused(401, "Invalid user token.")
                self.answer(200, {"name": "me", "type": "user"})
            elif found := _FILE.fullmatch(url.path):
                self.file(*(unquote(part or "") for part in found.groups()))
            elif found := _API.fullmatch(url.path):
                asked = {**parse_qs(url.query), **parse_qs(content.decode())}
                self.answer(200, self.api(*(unquote(part or "") for part in found.groups()), asked))
            else:
                raise Refused(404, "no such path")
        except Refused as refused:
            self.answer(refused.status, refused.content, refused.headers)

    do_HEAD = do_POST = do_GET  # noqa: N815 - names of the standard library

    @property
    def logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def log_message(self, *_) -> None:
        """Nothing: `seen` has it."""

    def api(
        self, kind: str, name: str, what: str, revision: str, path: str, asked: Mapping
    ) -> object:
        repository = name if kind == "models" else f"{kind}/{name}"
        commit = self.commit(repository, revision or "main")
        if what in ("", "revision"):
            about = {"id": name, "sha": commit.id, "private": False, "gated": False, "tags": []}
            return about | {"siblings": [{"rfilename": file} for file in commit.files]}
        if what == "tree":
            entries = commit.below(path, asked.get("recursive") == ["true"])
            if path and not entries:
                raise Refused(404, "EntryNotFound", commit)
            return entries
        if what == "paths-info":
            return [commit.tree[path] for path in asked.get("paths", []) if path in commit.tree]
        return discussions(name, self.hub.repositories[repository])

    def file(self, dataset: str, name: str, revision: str, path: str) -> None:
        """Send a file or a range of it, with the headers that name it in the client's cache."""
        commit = self.commit(f"{dataset}{name}", revision)
        if (file := commit.files.get(path)) is None:
            raise Refused(404, "EntryNotFound", commit)
        first, last, status = 0, file.size - 1, 200
        headers = {"X-Repo-Commit": commit.id, "Accept-Ranges": "bytes"}
        headers["ETag"] = f'"{file.sha256 or file.blob}"'
        if file.sha256:
            headers |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": headers["ETag"]}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last, status = int(asked[1]), min(last, int(asked[2] or last)), 206
            headers["Content-Range"] = f"bytes {first}-{last}/{file.size}"
        cut = self.hub.cuts.get(path)
        content = file.path.read_bytes()[first : last + 1]
        self.send(status, content, headers, None if cut is None else max(cut - first, 0))

    def commit(self, repository: str, revision: str) -> Commit:
        if repository not in self.hub.repositories:
            raise Refused(401, "RepoNotFound")  # as for a private one
        if repository in self.hub.gated and not self.logged_in:
            raise Refused(401, "GatedRepo")
        known = self.hub.repositories[repository]
        commit = {**{c.id: c for c in known.values()}, **known}.get(revision)
        if commit is None:
            raise Refused(404, "RevisionNotFound")
        return commit

    def answer(self, status: int, said: object, headers: Mapping[str, str] | None = None) -> None:
        json_headers = {"Content-Type": "application/json", **(headers or {})}
        self.send(status, json.dumps(said).encode(), json_headers)

    def send(
        self, status: int, content: bytes, headers: Mapping[str, str], cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])


def discussions(name: str, revisions: Iterable[str]) -> dict:
    common = {"title": "Adding safetensors", "author": {"name": CONVERTER}, "status": "open"}
    common |= {"createdAt": "2023-01-01T00:00:00.000Z", "isPullRequest": True}
    common |= {"repo": {"name": name, "type": "model"}}
    numbers = [int(one.rsplit("/", 1)[1]) for one in revisions if one.startswith("refs/pr/")]
    found = [common | {"num": number} for number in numbers]
    return {"discussions": found, "count": len(found), "start": 0}
