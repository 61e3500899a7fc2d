"""A hub on this machine: folders served by HTTP as huggingface_hub and datasets ask the real one
for public repositories.

Knows the paths that downloading uses and those of uploading with git LFS, to one account. No xet,
and no exported parquet of the data set viewer.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

# what lies in git LFS on the hub
LARGE = (".safetensors", ".parquet", ".arrow", ".tar", ".zip", ".png", ".jpg")
CONVERTER = "SFconvertbot"
TOKEN = "hf_of_a_rehearsal"
_KIND = "(models|datasets|spaces)"
_API = re.compile(
    rf"/api/{_KIND}/([^/]+/[^/]+)(?:/(revision|tree|paths-info|discussions)(?:/([^/]+)(?:/(.+))?)?)?"
)
_PUSH = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")
_LFS = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_FILE = re.compile(r"/(datasets/|spaces/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Stored:
    """One file of a commit, with the ids that git and git LFS give it."""

    def __init__(self, path: Path, name: str):
        content = path.read_bytes()
        self.path, self.name, self.size = path, name, len(content)
        self.blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        self.sha256 = hashlib.sha256(content).hexdigest() if name.endswith(LARGE) else None

    def told(self) -> dict:
        """What the tree tells of it."""
        entry = {"type": "file", "path": self.name, "size": self.size, "oid": self.blob}
        return entry | (
            {"lfs": {"oid": self.sha256, "size": self.size, "pointerSize": 130}}
            if self.sha256
            else {}
        )


class Commit:
    """A folder as it is now; its id follows from names and contents."""

    def __init__(self, repository: str, folder: Path):
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self.files = {
            name: Stored(path, name)
            for path in paths
            for name in [path.relative_to(folder).as_posix()]
        }
        told = "".join(f"{name} {file.blob}\n" for name, file in self.files.items())
        self.id = hashlib.sha1(f"{repository}\n{told}".encode()).hexdigest()
        # files and folders by path, as they are told
        folders = {str(parent) for name in self.files for parent in PurePosixPath(name).parents} - {
            "."
        }
        self.tree = {
            name: {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
            for name in sorted(folders)
        }
        self.tree |= {name: file.told() for name, file in self.files.items()}

    def below(self, folder: str, recursive: bool) -> list[dict]:
        """What lies in a folder, '' for the uppermost, or at any depth below it."""
        inside = {
            path: entry
            for path, entry in self.tree.items()
            if path.startswith(f"{folder}/") or not folder
        }
        return [
            entry
            for path, entry in inside.items()
            if recursive or str(PurePosixPath(path).parent) == (folder or ".")
        ]


class HubServer:
    """Serves repositories on 127.0.0.1 for the time of a `with`.

    repositories: "owner/model", "datasets/owner/name" or "spaces/owner/name" -> the folder that is
    its branch main, or
                  {revision: folder}. A revision refs/pr/N is also a pull request of the hub's own
                  safetensors converter.
    gated:        repositories that are refused to who is not logged in, which TOKEN does.
    uploads:      a folder for what is uploaded by who has TOKEN; each repository is served from
                  there on. None takes nothing.
    cuts:         file name -> the byte behind which the connection breaks off, as long as the entry
                  is there.
    seen:         every request: "GET /path?query", with the range of bytes asked for.
    """

    def __init__(
        self,
        repositories: Mapping[str, Path | Mapping[str, Path]],
        gated: Collection[str] = (),
        uploads: Path | None = None,
    ):
        given = {
            name: {"main": at} if isinstance(at, Path) else dict(at)
            for name, at in repositories.items()
        }
        self.repositories = {
            name: {rev: Commit(name, at) for rev, at in revisions.items()}
            for name, revisions in given.items()
        }
        self.gated = frozenset(gated)
        self.uploads, self.large = uploads, dict[str, bytes]()
        self.cuts: dict[str, int] = {}
        self.seen: list[str] = []
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self})
        )
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def commit(self, repository: str, revision: str = "main") -> str:
        return self.repositories[repository][revision].id

    def environment(self, home: Path) -> dict[str, str]:
        """What a process must have in its environment, before it starts, for this server to be its
        hub; `home` is its cache.
        """
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def __enter__(self) -> "HubServer":
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuses every connection from now on."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with it, so that none is left when the server stops."""

    hub: HubServer

    def do_GET(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.seen.append(
            " ".join([self.command, self.path, *self.headers.get_all("Range", [])])
        )
        url = urlsplit(self.path)
        if self.hub.uploads and (answer := self.uploaded(url.path, content)) is not None:
            self.answer(*answer)
            return
        body = content.decode()
        if found := _FILE.fullmatch(url.path):
            self.file(*(unquote(part or "") for part in found.groups()))
        elif found := _API.fullmatch(url.path):
            self.api(
                *(unquote(part or "") for part in found.groups()),
                {**parse_qs(url.query), **parse_qs(body)},
            )
        else:
            self.answer(404, {"error": "no such path"})

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - names of the standard library

    def uploaded(self, path: str, content: bytes) -> tuple[int, object] | None:
        """What is answered to a step of an upload, in their order; None where it is none."""
        if path.startswith("/lfs/"):
            self.hub.large[path.removeprefix("/lfs/")] = content
            return 200, {}
        push, batch = _PUSH.fullmatch(path), _LFS.fullmatch(path)
        if not (
            push or batch or path in ("/api/whoami-v2", "/api/repos/create", "/api/validate-yaml")
        ):
            return None
        if (
            self.headers.get("Authorization", self.headers.get("authorization"))
            != f"Bearer {TOKEN}"
        ):
            return 401, {"error": "Invalid user token."}
        asked = [json.loads(line) for line in content.splitlines()] or [{}]
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user"}
        if path == "/api/validate-yaml":
            front = yaml.safe_load(asked[0]["content"].split("---")[1])
            wrong = [] if isinstance(front, dict) else [{"message": "the card has no metadata"}]
            return 200 if not wrong else 400, {"errors": wrong, "warnings": []}
        if path == "/api/repos/create":
            return 200, {"url": f"{self.hub.url}/{asked[0]['organization']}/{asked[0]['name']}"}
        if batch:
            how = lambda oid: {"upload": {"href": f"{self.hub.url}/lfs/{oid}"}}  # noqa: E731
            return 200, {
                "objects": [one | {"actions": how(one["oid"])} for one in asked[0]["objects"]]
            }
        name, step = push.groups()
        if step == "preupload":
            mode = lambda path: "lfs" if path.endswith(LARGE) else "regular"  # noqa: E731
            files = [one["path"] for one in asked[0]["files"]]
            return 200, {
                "files": [
                    {"path": file, "uploadMode": mode(file), "shouldIgnore": False}
                    for file in files
                ]
            }
        for key, value in ((one["key"], one["value"]) for one in asked[1:]):
            file = self.hub.uploads / name / value["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(
                base64.b64decode(value["content"])
                if key == "file"
                else self.hub.large[value["oid"]]
            )
        commit = Commit(name, self.hub.uploads / name)
        self.hub.repositories[name] = {"main": commit}
        return 200, {
            "commitUrl": f"{self.hub.url}/{name}/commit/{commit.id}",
            "commitOid": commit.id,
        }

    def log_message(self, *_) -> None:
        """Nothing: `seen` has it."""

    def api(
        self,
        kind: str,
        name: str,
        what: str,
        revision: str,
        path: str,
        asked: Mapping[str, list[str]],
    ) -> None:
        repository = name if kind == "models" else f"{kind}/{name}"
        commit = self.commit(repository, revision or "main")
        if commit is None:
            return
        if what in ("", "revision"):
            siblings = [{"rfilename": file} for file in commit.files]
            self.answer(
                200,
                {
                    "id": name,
                    "sha": commit.id,
                    "private": False,
                    "gated": False,
                    "tags": [],
                    "siblings": siblings,
                },
            )
        elif what == "tree":
            told = commit.below(path, asked.get("recursive") == ["true"])
            self.answer(200, told) if told or not path else self.refuse(
                404, "EntryNotFound", commit
            )
        elif what == "paths-info":
            self.answer(
                200, [commit.tree[path] for path in asked.get("paths", []) if path in commit.tree]
            )
        else:
            self.answer(200, discussions(name, self.hub.repositories[repository]))

    def file(self, dataset: str, name: str, revision: str, path: str) -> None:
        """A file of a repository, or what is asked for of it, with the headers the client takes its
        cache's names from.
        """
        commit = self.commit(f"{dataset}{name}", revision)
        if commit is None:
            return
        if (file := commit.files.get(path)) is None:
            self.refuse(404, "EntryNotFound", commit)
            return
        first, last = 0, file.size - 1
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(asked[1]), min(last, int(asked[2] or last))
        etag = file.sha256 or file.blob
        told = {"X-Repo-Commit": commit.id, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        told |= (
            {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{etag}"'} if file.sha256 else {}
        )
        told |= {"Content-Range": f"bytes {first}-{last}/{file.size}"} if asked else {}
        content = file.path.read_bytes()[first : last + 1]
        cut = self.hub.cuts.get(path)
        self.send(
            206 if asked else 200, content, told, None if cut is None else max(cut - first, 0)
        )

    def commit(self, repository: str, revision: str) -> Commit | None:
        """The commit of a branch, tag or commit id; None after an answer that there is none."""
        if repository not in self.hub.repositories:
            # as to who is not logged in, and might not be told of it
            return self.refuse(401, "RepoNotFound")
        if repository in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "GatedRepo")
        known = self.hub.repositories[repository]
        commit = {**{c.id: c for c in known.values()}, **known}.get(revision)
        return commit or self.refuse(404, "RevisionNotFound")

    def refuse(self, status: int, code: str, commit: Commit | None = None) -> None:
        told = {"X-Error-Code": code, "X-Error-Message": code}
        self.answer(
            status, {"error": code}, told | ({"X-Repo-Commit": commit.id} if commit else {})
        )

    def answer(self, status: int, said: object, headers: Mapping[str, str] | None = None) -> None:
        self.send(
            status,
            json.dumps(said).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )

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
    """The pull requests of a repository."""
    numbers = [
        int(revision.rsplit("/", 1)[1]) for revision in revisions if revision.startswith("refs/pr/")
    ]
    common = {
        "title": "Adding safetensors",
        "author": {"name": CONVERTER},
        "createdAt": "2023-01-01T00:00:00.000Z",
    }
    common |= {"status": "open", "repo": {"name": name, "type": "model"}, "isPullRequest": True}
    return {
        "discussions": [common | {"num": number} for number in numbers],
        "count": len(numbers),
        "start": 0,
    }
