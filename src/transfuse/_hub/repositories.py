"""Which repository a request is for: the model's, or one of those that the versions of an adapter are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from transfuse._hub import page
from transfuse._hub.adapter_versions import AdapterVersions
from transfuse._hub.assets import Assets
from transfuse._hub.commits import Commit, Unavailable, Visitor
from transfuse._hub.repository import NO_REPO, Repository, parts_of, refuse
from transfuse._wire.http_server import HttpAnswer, Question


class _OneVersion:
    """A version as the commits of a repository. Its name says which one it is."""

    newest = None

    def __init__(self, versions: AdapterVersions, number: int) -> None:
        self._versions, self._number = versions, number

    def reading(self, revision: str, visitor: Visitor, *, lists: bool = False) -> AbstractContextManager[Commit | None]:
        return self._versions.reading(self._number, revision, visitor)

    def glance(self) -> tuple[dict[str, int], int | None]:
        return self._versions.glance(self._number)


class Repositories:
    """All repositories of one Hub."""

    def __init__(self, model: Repository | None, adapters: Sequence[AdapterVersions], *, needs_token: bool) -> None:
        self._model, self._adapters, self._needs_token = model, adapters, needs_token
        if model is not None:
            model.versions = self._sizes

    @contextmanager
    def answer(self, question: Question, visitor: Visitor) -> Iterator[HttpAnswer]:
        """The answer to a request. Its body is valid within this block."""
        try:
            found = self._found(question)
        except Unavailable as error:
            yield refuse(503, "", str(error), {"Retry-After": "1"})
            return
        if isinstance(found, HttpAnswer):
            yield found
            return
        with found.answer(question, visitor) as answer:
            yield answer

    def _found(self, question: Question) -> Repository | HttpAnswer:
        """The repository that a request is for, or what it is answered if there is none."""
        parts, query = parts_of(question.target)
        is_api = parts[:2] == ["api", "models"]
        where = parts[2:] if is_api else parts
        for versions in self._adapters:
            number = versions.number_in(where)
            if number is not None and versions.has(number):
                name, needs_token = versions.name_of(number), self._needs_token
                commits = _OneVersion(versions, number)
                return Repository(name, commits, Assets(None), needs_token=needs_token, library="peft")
        shown = page.is_wanted(question.method, question.headers.get("accept"))
        if is_api and not any(where) and question.method == "GET":
            return self._list(query.get("author", [""])[0])
        if self._model is not None and (not self._adapters or self._model.is_asked_by(where, is_shown=shown)):
            return self._model
        sizes = self._sizes()
        if shown and not any(parts):
            names = [versions.name for versions in self._adapters]
            body = page.adapters(names, sizes, question.headers, needs_token=self._needs_token)
            return HttpAnswer(200, page.HEADERS, body)
        there = ", ".join(self._names(sizes)) or "nothing yet"
        if shown:
            return HttpAnswer(404, page.HEADERS, page.notice("There is no such page", f"This Hub has {there}."))
        return refuse(404, NO_REPO, f"there is no such repository, or not any more; this hub has {there}")

    def _list(self, author: str) -> HttpAnswer:
        """What ``HfApi().list_models()`` gets: the model, and all versions, newest first."""
        names = self._names(self._sizes())
        shown = [name for name in names if not author or name.startswith(f"{author}/")]
        body = json.dumps([{"id": name, "modelId": name} for name in shown]).encode()
        return HttpAnswer(200, {"Content-Type": "application/json; charset=utf-8"}, body)

    def _names(self, versions: Iterable[str]) -> list[str]:
        return [*([] if self._model is None else [self._model.name]), *versions]

    def _sizes(self) -> dict[str, int]:
        return {name: size for versions in self._adapters for name, size in versions.sizes().items()}
