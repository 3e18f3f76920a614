"""The answers of a Hub with one repository, without HTTP: what a method, a path and headers lead to.

The requests are those of ``huggingface_hub`` 2.4; ``docs/hub.md`` lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from transfuse._errors import TransfuseError, as_utf8
from transfuse._hub import page
from transfuse._hub.assets import Assets
from transfuse._hub.commits import MAIN, Commit, Visitor
from transfuse._report import Version
from transfuse._wire.http_server import HttpAnswer, Question

_COMMIT = re.compile(r"[0-9a-f]{40}")
_RANGE = re.compile(r"bytes=(\d{0,99})-(\d{0,99})")

#: What a client is told in ``X-Error-Code``, and what it raises then.
NO_REPO, NO_REVISION, NO_ENTRY = "RepoNotFound", "RevisionNotFound", "EntryNotFound"


class Readable(Protocol):
    """What a repository's answers are made from."""

    def reading(
        self, revision: str, visitor: Visitor, *, lists: bool = False
    ) -> AbstractContextManager[Commit | None]: ...

    def glance(self) -> tuple[dict[str, int], int | None]: ...

    @property
    def newest(self) -> Version | None: ...


class Repository:
    """One repository with one branch, ``main``."""

    def __init__(
        self, name: str, commits: Readable, assets: Assets, *, needs_token: bool, library: str = "transformers"
    ) -> None:
        """``library``: what loads it, for clients that want to know."""
        self.name, self._needs_token, self._library = name, needs_token, library
        #: The names and sizes of the versions that are beside this repository, for its page.
        self.versions: Callable[[], Mapping[str, int]] = dict
        self._parts = name.split("/")
        self._commits = commits
        self._assets = assets

    def is_asked_by(self, where: Sequence[str], *, is_shown: bool) -> bool:
        """Whether a path names this repository, or nothing: then a browser is shown its page."""
        return list(where[: len(self._parts)]) == self._parts or (is_shown and not any(where))

    @contextmanager
    def answer(self, question: Question, visitor: Visitor) -> Iterator[HttpAnswer]:
        """The answer to a request. Its body is valid within this block."""
        parts, query = parts_of(question.target)
        count = len(self._parts)
        if parts[:2] == ["api", "models"] and parts[2 : 2 + count] == self._parts:
            rest, is_file = parts[2 + count :], False
        elif parts[:count] == self._parts and parts[count : count + 1] == ["resolve"]:
            rest, is_file = parts[count:], True
        elif page.is_wanted(question.method, question.headers.get("accept")):
            yield self._page(parts, question)
            return
        else:
            yield refuse(404, NO_REPO, f"this hub has one repository: {self.name}")
            return
        revision = rest[1] if len(rest) > 1 and rest[0] != "refs" else MAIN
        known = ("resolve",) if is_file else ("revision", "tree", "paths-info", "commits")
        if rest and rest != ["refs"] and (rest[0] not in known or len(rest) < 2):
            yield refuse(404, NO_ENTRY, "this hub does not answer that")
            return
        allowed = ("POST",) if rest[:1] == ["paths-info"] else ("GET", "HEAD")
        if question.method not in allowed:
            yield HttpAnswer(405, {"Allow": ", ".join(allowed)})
            return
        if revision != MAIN and not _COMMIT.fullmatch(revision):
            yield refuse(404, NO_REVISION, f"there is one branch, {MAIN}, and commits of 40 hex digits")
            return
        with ExitStack() as stack:
            try:
                lists = rest[:1] in (["tree"], ["paths-info"])
                commit = stack.enter_context(self._commits.reading(revision, visitor, lists=lists))
            except TransfuseError as error:
                answer = refuse(503, "", str(error), {"Retry-After": "1"})
            else:
                if commit is None:
                    answer = refuse(404, NO_REVISION, f"commit {revision} is not held any more; ask for {MAIN} again")
                else:
                    answer = self._of(commit, rest, query, question)
            yield answer

    def _of(
        self, commit: Commit, rest: Sequence[str], query: Mapping[str, Sequence[str]], question: Question
    ) -> HttpAnswer:
        what = rest[0] if rest else "revision"
        if what == "resolve":
            return self._file(commit, "/".join(rest[2:]) if all("/" not in part for part in rest[2:]) else "", question)
        if what == "tree":
            return self._tree(
                commit, "/".join(rest[2:]), recursive=query.get("recursive") in (["true"], ["True"], ["1"])
            )
        if what == "paths-info":
            return self._paths(commit, question)
        if what == "commits":
            return _json(commit, [self._about(commit)])
        if what == "refs":
            branch = {"name": MAIN, "ref": f"refs/heads/{MAIN}", "targetCommit": commit.id}
            return _json(commit, {"branches": [branch], "converts": [], "tags": [], "pullRequests": []})
        return self._info(commit, blobs="true" in query.get("blobs", ()))

    def _page(self, parts: Sequence[str], question: Question) -> HttpAnswer:
        """What a browser gets."""
        if [part for part in parts if part] not in ([], self._parts):
            there = page.notice("There is no such page", f"This Hub has one repository, {self.name}.")
            return HttpAnswer(404, page.HEADERS, there)
        try:
            found, step = self._commits.glance()
            versions = self.versions()
        except TransfuseError as error:
            body = page.notice(self.name, "The job's state cannot be read now. Load this page again.", str(error))
            return HttpAnswer(503, page.HEADERS | {"Retry-After": "1"}, body)
        sizes, newest = {**found, **self._assets.sizes()}, self._commits.newest
        headers, tokens = question.headers, self._needs_token
        body = page.overview(self.name, step, newest, sizes, headers, needs_token=tokens, versions=versions)
        return HttpAnswer(200, page.HEADERS, body)

    # ------------------------------------------------------------------------------------------------ what there is

    def _sizes(self, commit: Commit) -> dict[str, int]:
        return {**self._assets.sizes(), **commit.sizes()}

    def _etag(self, commit: Commit, name: str) -> str | None:
        return commit.etags.get(name) or self._assets.etag(name)

    def _info(self, commit: Commit, *, blobs: bool) -> HttpAnswer:
        siblings: list[dict[str, Any]] = []
        for name, size in self._sizes(commit).items():
            more = {"size": size, "blobId": self._etag(commit, name)} if blobs else {}
            siblings.append({"rfilename": name, **more})
        about = {
            "_id": commit.id[:24],
            "id": self.name,
            "modelId": self.name,
            "author": self._parts[0] if len(self._parts) > 1 else None,
            "sha": commit.id,
            "lastModified": _date(commit),
            "private": False,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "library_name": self._library,
            "tags": ["safetensors"],
            "transfuse": {"step": commit.step, "version": commit.id},
            "siblings": siblings,
        }
        return _json(commit, about)

    def _about(self, commit: Commit) -> dict[str, Any]:
        title = "a state without a step" if commit.step is None else f"step {commit.step}"
        if commit.is_loose:
            title += " and changes outside of mutating(): perhaps half of a step"
        return {
            "id": commit.id,
            "title": title,
            "message": "",
            "authors": [{"user": "transfuse"}],
            "date": _date(commit),
        }

    def _entry(self, commit: Commit, name: str, size: int) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": size, "oid": self._etag(commit, name) or ""}

    def _tree(self, commit: Commit, folder: str, *, recursive: bool) -> HttpAnswer:
        sizes = self._sizes(commit)
        start = f"{folder.strip('/')}/" if folder.strip("/") else ""
        listed: list[dict[str, Any]] = []
        folders = set()
        for name, size in sizes.items():
            if not name.startswith(start):
                continue
            inner = name[len(start) :].split("/")[:-1]
            depth = len(inner) if recursive else min(1, len(inner))
            folders |= {start + "/".join(inner[: i + 1]) for i in range(depth)}
            if recursive or not inner:
                listed.append(self._entry(commit, name, size))
        listed += [_folder(name) for name in sorted(folders)]
        if start and not listed:
            return refuse(404, NO_ENTRY, f"there is no directory {folder}", {"X-Repo-Commit": commit.id})
        return _json(commit, listed)

    def _paths(self, commit: Commit, question: Question) -> HttpAnswer:
        wanted: Any
        try:
            if question.headers.get("content-type", "").startswith("application/json"):
                wanted = json.loads(question.body).get("paths", [])
            else:
                wanted = parse_qs(question.body.decode(), max_num_fields=10_000).get("paths", [])
        except (ValueError, AttributeError, RecursionError):
            return refuse(400, "", "the body is neither JSON nor a form with paths")
        names = [wanted] if isinstance(wanted, str) else wanted
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return refuse(400, "", "paths must be a list of names")
        sizes = self._sizes(commit)
        folders = {name.rsplit("/", i)[0] for name in sizes for i in range(1, name.count("/") + 1)}
        found = [self._entry(commit, name, sizes[name]) for name in dict.fromkeys(names) if name in sizes]
        return _json(commit, found + [_folder(name) for name in dict.fromkeys(names) if name in folders])

    # ------------------------------------------------------------------------------------------------ files

    def _file(self, commit: Commit, name: str, question: Question) -> HttpAnswer:
        headers = {"X-Repo-Commit": commit.id}
        body: bytes | memoryview | None = commit.bytes(name)
        etag = commit.etags.get(name)
        if body is None or etag is None:
            asset = self._assets.read(name)
            if asset is None:
                return refuse(404, NO_ENTRY, "there is no such file", headers)
            body, etag = asset.data, asset.etag
        headers |= {"ETag": f'"{etag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        headers["Content-Disposition"] = f'inline; filename="{as_name(name)}"'
        asked = question.headers.get("range") if question.method == "GET" else None
        if asked is None or question.headers.get("if-range", headers["ETag"]) != headers["ETag"]:
            return HttpAnswer(200, headers, body, commit)
        part = range_of(asked, len(body))
        if part is None:
            return HttpAnswer(200, headers, body, commit)
        if not part:
            headers["Content-Range"] = f"bytes */{len(body)}"
            return HttpAnswer(416, headers)
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(body)}"
        return HttpAnswer(206, headers, memoryview(body)[part.start : part.stop], commit)


def parts_of(target: str) -> tuple[list[str], dict[str, list[str]]]:
    """The parts of a request's path, and its query."""
    split = urlsplit("//host" + target if target.startswith("/") else "//host/")
    # Split first: an encoded slash is no separator.
    return [unquote(part) for part in split.path.split("/")[1:]], parse_qs(split.query)


def range_of(text: str, size: int) -> range | None:
    """The bytes that a Range header asks for; empty if there are none; None if the header is to be ignored.

    Headers that are malformed or ask for several ranges are ignored, as RFC 9110 allows: the answer is the whole file.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        return range(max(0, size - int(found[2])), size)
    first, last = int(found[1]), int(found[2]) if found[2] else size - 1
    if found[2] and last < first:
        return None
    return range(first, min(last + 1, size)) if first < size else range(0)


def as_name(name: str) -> str:
    """A name that can stand in a header."""
    return re.sub(r"[^\w.-]", "_", name.rpartition("/")[2], flags=re.ASCII)


def _folder(name: str) -> dict[str, Any]:
    return {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}


def _date(commit: Commit) -> str:
    return datetime.fromtimestamp(commit.made_at, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _json(commit: Commit, said: object) -> HttpAnswer:
    headers = {"Content-Type": "application/json; charset=utf-8", "X-Repo-Commit": commit.id}
    return HttpAnswer(200, headers, json.dumps(said).encode())


def refuse(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    # A header is one line of Latin letters.
    line = re.sub(r"[^\x20-\x7e]+", " ", message)[:1000]
    errors = ({"X-Error-Code": code} if code else {}) | {"X-Error-Message": line}
    body = json.dumps({"error": as_utf8(message)}).encode()
    return HttpAnswer(status, {"Content-Type": "application/json; charset=utf-8", **errors, **(headers or {})}, body)
