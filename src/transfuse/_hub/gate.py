"""Who may ask a Hub anything: clients that send its token, and on loopback those that come by this machine's names."""

from __future__ import annotations

import hashlib
import hmac

from transfuse._hub import page
from transfuse._wire.handshake import is_loopback
from transfuse._wire.http_server import HttpAnswer, Question, names_this_machine


class Gate:
    """Refuses requests before their bodies are read. A browser gets a page that says why."""

    def __init__(self, host: str, token: bytes | None) -> None:
        self._token = None if token is None else hashlib.sha256(token).digest()
        self._is_loopback = is_loopback(host)

    def refusal(self, question: Question) -> HttpAnswer | None:
        """What a request is refused with; None: it may come in."""
        headers = question.headers
        shown = page.is_wanted(question.method, headers.get("accept"))
        if not self._is_allowed(headers.get("authorization")):
            given = "another token was sent" if "authorization" in headers else "no token was sent"
            advice = f"{given}: set HF_TOKEN to the token that this hub was started with"
            said = {"WWW-Authenticate": "Bearer", "X-Error-Message": advice}
            return HttpAnswer(401, said | page.HEADERS, page.locked(headers)) if shown else HttpAnswer(401, said)
        if not self._is_expected(headers.get("host")):
            return HttpAnswer(403, page.HEADERS, page.wrong_name()) if shown else HttpAnswer(403)
        return None

    def _is_allowed(self, said: str | None) -> bool:
        """Whether an Authorization header carries the token. Takes the same time for any wrong one."""
        if self._token is None:
            return True
        scheme, _, secret = (said or "").partition(" ")
        given = hashlib.sha256(secret.strip().encode("latin-1", "replace")).digest()
        return hmac.compare_digest(given, self._token) and scheme.lower() == "bearer"

    def _is_expected(self, host: str | None) -> bool:
        """The token keeps a page in a browser out; without one, names that are not this machine's are refused."""
        return self._token is not None or not self._is_loopback or names_this_machine(host)
