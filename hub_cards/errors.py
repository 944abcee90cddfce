"""One line for each way in which talking to the Hub fails: what, where, and what to do."""

import contextlib
from typing import Any

ADVICE = {
    400: "the Hub refused the content; its message names the field",
    401: "the token is missing or not accepted; run `hf auth login` or set HF_TOKEN",
    403: "the token may not write there; use a token with write access to that namespace",
    404: "the repository does not exist or is not visible with this token; check its name and the token",
    409: "the repository was changed meanwhile; try again",
    412: "the repository was changed meanwhile; try again",
    429: "too many requests; wait and try again",
}
LOST = "the connection to the Hub was lost; run the same again (a commit is taken as a whole or not at all)"


def _chain(error: BaseException):
    """The error and everything it came from, the innermost last."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _said(error: BaseException) -> str:
    """The server's own sentence, or the last line of the message."""
    message = getattr(error, "server_message", None) or str(error)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def _is_transport(error: BaseException) -> bool:
    """Whether the connection itself failed; huggingface_hub 1 uses httpx, 2 httpx2."""
    package = type(error).__module__.split(".")[0]
    return package.startswith(("httpx", "httpcore", "requests")) or isinstance(
        error, ConnectionError | TimeoutError
    )


def _cause(error: BaseException) -> str | None:
    """What the Hub or the connection did, and the fix; None where neither is in the chain of causes."""
    for one in _chain(error):
        status = getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(status, int):
            other = "the Hub had a fault; try again later" if status >= 500 else "see its message"
            return f"{ADVICE.get(status, other)} (HTTP {status}: {_said(one)})"
        if _is_transport(one):
            return f"{LOST} ({type(one).__name__}: {_said(one)})"
    return None


def explain_hub_error(error: BaseException, action: str = "talking to the Hub") -> str:
    """One line that says why ``action`` failed and how to go on.

    Args:
        error: what huggingface_hub, Transformers or PEFT raised; the whole chain of causes is looked at.
        action: what was tried, such as ``push to org/name``.

    Returns:
        A string without line breaks, fit for a command line's standard error.
    """
    return f"{action} failed: {_cause(error) or f'{type(error).__name__}: {_said(error)}'}"


@contextlib.contextmanager
def explained(action: str):
    """Around ``action``: an error of the Hub stays what it is and gets its cause as a note (Python 3.11 on)."""
    try:
        yield
    except Exception as error:
        add_note: Any = getattr(error, "add_note", None)
        if add_note and _cause(error):
            add_note(explain_hub_error(error, action))
        raise
