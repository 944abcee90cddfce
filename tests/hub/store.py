"""What the loopback Hub keeps: repositories as lists of whole commits, in memory.

A commit is parsed completely before anything is stored, and then appended in one step, so a repository is
always at its old commit or at its new one. That is what the real Hub promises, and what the tests of dropped
connections rest on.
"""

import base64
import hashlib
import json
import threading


class Refused(Exception):
    """A request the Hub answers with an error: HTTP status, the ``X-Error-Code`` or None, and the message."""

    def __init__(self, status: int, code: str | None, message: str):
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def blob_oid(content: bytes) -> str:
    """The git object id of a file: what the Hub sends as ETag and as ``oid``."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Repository:
    """One repository: its commits (oid, files) and the branch heads."""

    def __init__(self, repo_id: str, private: bool):
        self.repo_id, self.private = repo_id, private
        self.trees: dict[str, dict[str, bytes]] = {}
        self.history: list[str] = []
        self.heads: dict[str, str] = {}
        self.append("main", {".gitattributes": b""})

    def append(self, branch: str, files: dict[str, bytes]) -> str:
        """Make ``files`` the next commit of ``branch`` and return its oid."""
        names = "\n".join(f"{blob_oid(content)} {path}" for path, content in sorted(files.items()))
        oid = hashlib.sha1(f"{self.repo_id} {len(self.history)}\n{names}".encode()).hexdigest()
        self.trees[oid] = files
        self.history.append(oid)
        self.heads[branch] = oid
        return oid

    def resolve(self, revision: str) -> str:
        """The commit oid behind a branch name or an oid."""
        oid = self.heads.get(revision, revision)
        if oid not in self.trees:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid


def parse_commit(body: bytes) -> tuple[dict, dict[str, bytes], list[str]]:
    """Read an NDJSON commit; gives its header, the files it writes and the paths it deletes."""
    header, written, deleted = None, {}, []
    for line in body.splitlines():
        try:
            item = json.loads(line)
            key, value = item["key"], item["value"]
        except (ValueError, KeyError, TypeError):
            raise Refused(400, None, "commit body is not complete NDJSON") from None
        if key == "header":
            header = value
        elif key == "file":
            written[value["path"]] = base64.b64decode(value["content"], validate=True)
        elif key == "deletedFile":
            deleted.append(value["path"])
        else:
            raise Refused(400, None, f"loopback Hub takes only regular files, got {key!r}")
    if header is None:
        raise Refused(400, None, "commit without header")
    return header, written, deleted


class Store:
    """All repositories; every method that changes one holds the lock."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.lock = threading.Lock()

    def create(self, repo_id: str, private: bool) -> None:
        """Make a repository with one first commit; 409 where it exists."""
        with self.lock:
            if repo_id in self.repositories:
                raise Refused(409, None, "You already created this model repo")
            self.repositories[repo_id] = Repository(repo_id, private)

    def get(self, repo_id: str, user: str | None) -> Repository:
        """The repository, if ``user`` may see it; the Hub does not tell hidden from missing."""
        repository = self.repositories.get(repo_id)
        hidden = repository is not None and repository.private and user != repo_id.split("/")[0]
        if repository is None or hidden:
            raise Refused(404 if user else 401, "RepoNotFound", "Repository not found")
        return repository

    def branch(self, repository: Repository, name: str, start: str) -> None:
        """Start a branch; 409 where it exists."""
        with self.lock:
            if name in repository.heads:
                raise Refused(409, None, "Reference already exists")
            repository.heads[name] = repository.resolve(start)

    def commit(self, repository: Repository, branch: str, body: bytes) -> str:
        """Apply an NDJSON commit as a whole and return its oid."""
        header, written, deleted = parse_commit(body)
        with self.lock:
            parent = repository.resolve(branch)
            if header.get("parentCommit") not in (None, parent):
                raise Refused(
                    412, None, "A commit has happened since. Please refresh and try again."
                )
            files = {
                path: data for path, data in repository.trees[parent].items() if path not in deleted
            }
            return repository.append(branch, files | written)
