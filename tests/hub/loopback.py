"""A Hugging Face Hub on 127.0.0.1, in the standard library: enough to publish and reload models.

Preupload answers "regular" for every file, so neither LFS nor Xet is used. Besides the Hub's own endpoints
there are two for tests: ``POST /_loopback/fault`` arms a dropped connection and ``GET /_loopback/repo/{id}``
reports a repository's state without any token. A request that no rule knows is answered 501 and noted in
``Hub.unknown``.
"""

import threading
from http.server import ThreadingHTTPServer

from .plumbing import GUEST_TOKEN, OWNER_TOKEN
from .protocol import Handler
from .store import Refused, Store

__all__ = ["GUEST_TOKEN", "OWNER_TOKEN", "Hub"]


class Hub:
    """The server, in a thread of its own, on a free port of 127.0.0.1. Use as a context manager."""

    def __init__(self):
        self.store = Store()
        self.unknown: list[str] = []
        self.faults: list[dict] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.hub = self
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )

    def __enter__(self) -> "Hub":
        self.thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def arm(self, what: str, path: str = "", times: int = 1) -> None:
        """Drop the next ``times`` connections of kind ``what`` whose URL contains ``path``.

        ``what``: "commit" (half of the request read), "commit-answer" (committed, answer lost) or "download"
        (half of the file sent, nothing where a download is resumed). "none" disarms everything.
        """
        if what not in ("commit", "commit-answer", "download", "none"):
            raise Refused(
                400, None, f"unknown fault {what!r}; allowed: commit, commit-answer, download, none"
            )
        self.faults = (
            [] if what == "none" else [*self.faults, {"what": what, "path": path, "times": times}]
        )

    def take(self, what: str, url: str) -> bool:
        """Use up one armed fault, if one fits."""
        for fault in self.faults:
            if fault["what"] == what and fault["path"] in url and fault["times"] > 0:
                fault["times"] -= 1
                return True
        return False
