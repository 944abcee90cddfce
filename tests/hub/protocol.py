"""The protocol of the loopback Hub: one method per endpoint."""

import json
import re

from .metadata import card_errors
from .plumbing import Plumbing
from .store import Refused, blob_oid

REPO, REV = r"(?P<repo>[^/]+/[^/]+)", r"(?P<rev>[^/]+)"
ROUTES = [
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", rf"/api/models/{REPO}/preupload/{REV}", "preupload"),
    ("POST", rf"/api/models/{REPO}/commit/{REV}", "commit"),
    ("POST", rf"/api/models/{REPO}/branch/{REV}", "branch"),
    ("GET", rf"/api/models/{REPO}(/revision/{REV})?", "info"),
    ("GET", rf"/api/models/{REPO}/tree/{REV}(/(?P<path>.*))?", "tree"),
    ("GET", rf"/{REPO}/resolve/{REV}/(?P<path>.+)", "resolve"),
    ("POST", r"/_loopback/fault", "fault"),
    ("GET", rf"/_loopback/repo/{REPO}", "state"),
]


class Handler(Plumbing):
    """The endpoints; a path's named groups arrive as arguments."""

    routes = ROUTES

    def on_create(self):
        """POST /api/repos/create."""
        wanted = json.loads(self.read_body())
        if self.user is None:
            raise Refused(401, None, "Invalid username or password.")
        repo = f"{wanted.get('organization') or self.user}/{wanted['name']}"
        if not repo.startswith(self.user + "/"):
            raise Refused(
                403, None, f"You don't have the rights to create a model under {repo.split('/')[0]}"
            )
        url = {"url": f"{self.hub.endpoint}/{repo}"}
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        try:
            self.hub.store.create(repo, private)
        except Refused as error:
            return self.answer(url | {"error": error.message}, error.status)
        self.answer(url)

    def on_validate_yaml(self):
        """POST /api/validate-yaml: 400 with the list of errors where the card's header is refused."""
        errors = [
            {"message": message} for message in card_errors(json.loads(self.read_body())["content"])
        ]
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def on_whoami(self):
        """GET /api/whoami-v2."""
        if self.user is None:
            raise Refused(401, None, "Invalid user token.")
        self.answer(
            {"type": "user", "name": self.user, "orgs": [], "auth": {"type": "access_token"}}
        )

    def on_preupload(self, repo, rev):
        """POST .../preupload: every file is "regular"; an unchanged file is recognised by its oid."""
        repository = self.writable(repo)
        files = repository.trees[repository.resolve(rev)]
        wanted = [item["path"] for item in json.loads(self.read_body())["files"]]
        known = {path: {"oid": blob_oid(files[path])} for path in wanted if path in files}
        plain = {"uploadMode": "regular", "shouldIgnore": False}
        self.answer({"files": [{"path": path, **plain, **known.get(path, {})} for path in wanted]})

    def on_commit(self, repo, rev):
        """POST .../commit: NDJSON in, the new commit out; may lose the connection before or after."""
        repository = self.writable(repo)
        if self.hub.take("commit", self.path):
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            return self.hang_up()
        oid = self.hub.store.commit(repository, rev, self.read_body())
        if self.hub.take("commit-answer", self.path):
            return self.hang_up()
        url = f"{self.hub.endpoint}/{repo}/commit/{oid}"
        self.answer({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def on_branch(self, repo, rev):
        """POST .../branch."""
        start = json.loads(self.read_body() or b"{}").get("startingPoint", "main")
        self.hub.store.branch(self.writable(repo), rev, start)
        self.answer({})

    def on_info(self, repo, rev="main"):
        """GET /api/models/{id}."""
        repository = self.hub.store.get(repo, self.user)
        oid = repository.resolve(rev)
        siblings = [{"rfilename": path} for path in sorted(repository.trees[oid])]
        self.answer(
            {
                "id": repo,
                "sha": oid,
                "private": repository.private,
                "tags": [],
                "siblings": siblings,
            }
        )

    def on_tree(self, repo, rev, path=""):
        """GET .../tree: always recursive, files only."""
        repository = self.hub.store.get(repo, self.user)
        files = repository.trees[repository.resolve(rev)]
        wanted = {
            name: data
            for name, data in files.items()
            if not path or name.startswith(path.rstrip("/") + "/")
        }
        self.answer(
            [
                {"type": "file", "path": name, "size": len(data), "oid": blob_oid(data)}
                for name, data in wanted.items()
            ]
        )

    def on_resolve(self, repo, rev, path):
        """HEAD and GET /{id}/resolve/{rev}/{file}, with byte ranges for resumed downloads."""
        repository = self.hub.store.get(repo, self.user)
        oid = repository.resolve(rev)
        headers = {"X-Repo-Commit": oid, "Accept-Ranges": "bytes"}
        data = repository.trees[oid].get(path)
        if data is None:
            raise Refused(404, "EntryNotFound", "Entry not found")
        headers["ETag"] = f'"{blob_oid(data)}"'
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return self.answer(data, 200, headers)
        first, last = int(span[1]), int(span[2] or len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
        self.answer(data[first : last + 1], 206, headers)

    def on_fault(self):
        """POST /_loopback/fault {"what", "path", "times"}: see ``Hub.arm``."""
        self.hub.arm(**json.loads(self.read_body()))
        self.answer({})

    def on_state(self, repo):
        """GET /_loopback/repo/{id}: whether it exists, is private, its commits and the files of main."""
        repository = self.hub.store.repositories.get(repo)
        if repository is None:
            return self.answer({"exists": False})
        files = {
            path: blob_oid(data)
            for path, data in repository.trees[repository.heads["main"]].items()
        }
        self.answer(
            {
                "exists": True,
                "private": repository.private,
                "commits": len(repository.history),
                "files": files,
            }
        )
