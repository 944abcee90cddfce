"""The plumbing of the loopback Hub: tokens, bodies, answers, and errors in the Hub's form."""

import json
import re
import socket
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from .store import Refused, Repository

OWNER_TOKEN, GUEST_TOKEN = "hf_loopbackowner", "hf_loopbackguest"
TOKENS = {OWNER_TOKEN: "tester", GUEST_TOKEN: "guest"}


class Plumbing(BaseHTTPRequestHandler):
    """One request; ``self.server.hub`` holds the state."""

    protocol_version = "HTTP/1.1"
    routes: list[tuple[str, str, str]] = []

    def log_message(self, *args):
        """Keep the test output quiet."""

    def do_GET(self):
        self.dispatch("GET")

    def do_HEAD(self):
        self.dispatch("GET")

    def do_POST(self):
        self.dispatch("POST")

    def dispatch(self, method: str) -> None:
        """Find the rule, run it, and turn ``Refused`` into the Hub's error form."""
        self.hub, self.body = self.server.hub, None
        path = unquote(urlsplit(self.path).path)
        try:
            self.user = self.authenticate()
            for verb, pattern, name in self.routes:
                match = re.fullmatch(pattern, path)
                if verb == method and match:
                    return getattr(self, "on_" + name)(
                        **{k: v for k, v in match.groupdict().items() if v is not None}
                    )
            self.hub.unknown.append(f"{self.command} {path}")
            raise Refused(501, None, f"loopback Hub does not know {self.command} {path}")
        except Refused as error:
            self.read_body()
            headers = {"X-Error-Message": error.message} | (
                {"X-Error-Code": error.code} if error.code else {}
            )
            self.answer({"error": error.message}, error.status, headers)

    def authenticate(self) -> str | None:
        """The user behind the token, None without one; a token the Hub does not know is 401 everywhere."""
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if not scheme:
            return None
        if scheme != "Bearer" or token not in TOKENS:
            raise Refused(401, None, "Invalid credentials in Authorization header")
        return TOKENS[token]

    def writable(self, repo: str) -> Repository:
        """The repository, if the user may write to it."""
        if self.user is None:
            raise Refused(401, None, "Invalid username or password.")
        repository = self.hub.store.get(repo, self.user)
        if self.user != repo.split("/")[0]:
            raise Refused(403, None, f"You don't have the rights to write to {repo}")
        return repository

    def read_body(self) -> bytes:
        """The request body, sized or chunked; read once."""
        if self.body is None:
            self.body = b"".join(self.pieces())
        return self.body

    def pieces(self):
        """The body as it arrives."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            yield self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, body, status: int = 200, headers: dict | None = None) -> None:
        """Send JSON, or bytes as they are; HEAD gets the headers only."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if (
            status in (200, 206)
            and isinstance(body, bytes)
            and self.hub.take("download", self.path)
        ):
            self.wfile.write(
                data[: len(data) // 2] if status == 200 else b""
            )  # a resumed download gets no further
            return self.hang_up()
        self.wfile.write(data)

    def hang_up(self) -> None:
        """Close the connection without another word."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True
