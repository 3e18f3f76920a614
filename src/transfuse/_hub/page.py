"""What a person sees who opens a Hub's address in a browser: plain HTML, no scripts, nothing from elsewhere.

Everything that is not written here is escaped: names of files, of the repository and of hosts may be hostile.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from urllib.parse import quote

from transfuse._hub.adapters import CONFIG_NAME
from transfuse._report import Version
from transfuse._sizes import human_bytes

#: The most files that the page lists.
MAX_LISTED = 1000
#: What a Host header looks like that may stand in a line for a shell.
_HOST = re.compile(r"[A-Za-z0-9.-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")
#: Letters that are not shown, or that turn the reading direction around.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")

_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --soft: #5f6672; --line: #d9dce1; --back: #ffffff; --code: #f4f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e6ea; --soft: #9aa2af; --line: #3a3f47; --back: #16181c; --code: #22252b; }
}
body { margin: 2.5rem auto; max-width: 52rem; padding: 0 1.25rem; background: var(--back); color: var(--text);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { margin: 0.5rem 0; }
.soft { color: var(--soft); }
pre { background: var(--code); border: 1px solid var(--line); border-radius: 6px; padding: 0.75rem 1rem;
      margin: 0.5rem 0; overflow-x: auto; font: 14px/1.5 ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: 0.35rem 0.5rem 0.35rem 0;
         text-align: left; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: normal; }
th + th, td + td { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
a { color: inherit; text-underline-offset: 3px; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

#: No page elsewhere may frame this one, and this one loads nothing, whatever a name might smuggle in.
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def is_wanted(method: str, accept: str | None) -> bool:
    """Whether a browser asks. Clients of the Hub take anything (``*/*``), or JSON."""
    return method in ("GET", "HEAD") and "text/html" in (accept or "").lower()


def notice(title: str, *sentences: str, then: Sequence[str] = ()) -> bytes:
    """A page that says why there is nothing else to see."""
    return _page(title, [f"<h1>{_shown(title)}</h1>", *(f"<p>{_shown(sentence)}</p>" for sentence in sentences), *then])


def locked(headers: Mapping[str, str]) -> bytes:
    """For readers that have not sent the token. It says nothing about what is here."""
    said = "A browser does not send it, so nothing is shown here. Readers set this before Python starts:"
    return notice("This Hub needs a token", said, then=[_settings(headers, needs_token=True)])


def wrong_name() -> bytes:
    """For readers that came by a name that may be an attacker's."""
    said = "It has no token, so it answers only to localhost and to loopback addresses such as 127.0.0.1."
    return notice("This Hub does not answer to that name", said)


def overview(
    name: str,
    step: int | None,
    newest: Version | None,
    sizes: Mapping[str, int],
    headers: Mapping[str, str],
    *,
    needs_token: bool,
    versions: Mapping[str, int] | None = None,
) -> bytes:
    """The page of a repository: the job's step, how to read it, and its files. ``headers`` are the request's.

    ``newest``: the newest commit that a reader has got. ``versions``: names and sizes of the versions of adapters
    beside it.
    """
    promise = "Readers get the newest step." if CONFIG_NAME not in sizes else "These files never change."
    at = "A running job" if step is None else f"Step {step:,} of a running job"
    of = "" if newest is None or newest.step is None else f", of step {newest.step:,}"
    got = [] if newest is None else [f'<p class="soft">Newest commit: <code>{newest.digest}</code>{of}.</p>']
    return _page(
        f"{name}, step {step}" if step is not None else name,
        [
            f"<h1>{_shown(name)}</h1>",
            f"<p>{at}, served by <code>transfuse.hub</code>.</p>",
            f'<p class="soft">The page shows the job as it was when you loaded it. {promise}</p>',
            *got,
            *_reading(name, sizes, headers, needs_token=needs_token),
            *_files(name, sizes),
            *(_versions(versions) if versions else []),
        ],
    )


def adapters(names: Sequence[str], sizes: Mapping[str, int], headers: Mapping[str, str], *, needs_token: bool) -> bytes:
    """The page of a Hub that has adapters alone: their versions, by name and size, newest first."""
    reading = [
        "<h2>Read one</h2>",
        "<p>Set these before Python starts:</p>",
        _settings(headers, needs_token=needs_token),
        *(_code(*_peft_lines(name)) for name in list(sizes)[:1]),
    ]
    title = ", ".join(names)
    said = "<p>Adapters of a running job, served by <code>transfuse.hub</code>: each step under a name of its own.</p>"
    return _page(title, [f"<h1>{_shown(title)}</h1>", said, *reading, *_versions(sizes)])


def _versions(sizes: Mapping[str, int]) -> list[str]:
    rows = [
        f'<tr><td><a href="/{quote(name)}"><bdi>{_shown(name)}</bdi></a></td><td>{human_bytes(size)}</td></tr>'
        for name, size in sizes.items()
    ]
    return [
        "<h2>Versions of the adapter</h2>",
        '<p class="soft">A name never stands for other bytes. Older versions make room for newer ones.</p>',
        "<table><thead><tr><th>name</th><th>size</th></tr></thead><tbody>",
        *rows,
        "</tbody></table>",
    ]


def _peft_lines(name: str) -> list[str]:
    comment = "  # base: the model that the adapter was made for"
    return ["import peft", "", f"model = peft.PeftModel.from_pretrained(base, {json.dumps(name)}){comment}"]


def _reading(name: str, sizes: Mapping[str, int], headers: Mapping[str, str], *, needs_token: bool) -> list[str]:
    quoted = json.dumps(name)
    parts = [
        "<h2>Read it</h2>",
        "<p>Set these before Python starts:</p>",
        _settings(headers, needs_token=needs_token),
    ]
    if "config.json" in sizes:
        lines = ["import transformers", ""]
        lines += [f"model = transformers.AutoModelForCausalLM.from_pretrained({quoted})  # or its own class"]
        if any(file.startswith("tokenizer") for file in sizes):
            lines += [f"tokenizer = transformers.AutoTokenizer.from_pretrained({quoted})"]
        parts += ["<p>The model, built and loaded:</p>", _code(*lines)]
    elif CONFIG_NAME in sizes:
        parts += ["<p>The adapter, loaded:</p>", _code(*_peft_lines(name))]
    else:
        parts += ["<p>There is no config.json here, so <code>from_pretrained</code> cannot build the model.</p>"]
    lines = ["from huggingface_hub import snapshot_download", "", f"folder = snapshot_download({quoted})"]
    return [*parts, "<p>The files, in a folder:</p>", _code(*lines)]


def _files(name: str, sizes: Mapping[str, int]) -> list[str]:
    rows = [
        f'<tr><td><a href="/{quote(name)}/resolve/main/{quote(file)}"><bdi>{_shown(file)}</bdi></a></td>'
        f"<td>{human_bytes(size)}</td></tr>"
        for file, size in list(sizes.items())[:MAX_LISTED]
    ]
    more = [f"<p>And {len(sizes) - MAX_LISTED:,} more files.</p>"] if len(sizes) > MAX_LISTED else []
    count = "1 file" if len(sizes) == 1 else f"{len(sizes):,} files"
    return [
        "<h2>Files</h2>",
        f'<p class="soft">{count}, {human_bytes(sum(sizes.values()))} in all</p>',
        "<table><thead><tr><th>name</th><th>size</th></tr></thead><tbody>",
        *rows,
        "</tbody></table>",
        *more,
    ]


def _settings(headers: Mapping[str, str], *, needs_token: bool) -> str:
    # The address by which the browser came: the Hub itself may know one that nobody else can use.
    host = headers.get("host", "")
    scheme = "https" if headers.get("x-forwarded-proto") == "https" else "http"
    token = (
        "export HF_TOKEN=…  # the token that this Hub was started with"
        if needs_token
        else "export HF_HUB_DISABLE_IMPLICIT_TOKEN=1  # this Hub needs no token: do not send yours"
    )
    return _code(f"export HF_ENDPOINT={scheme}://{host if _HOST.fullmatch(host) else 'HOST:PORT'}", token)


def _shown(text: str) -> str:
    return escape(_UNSEEN.sub("\ufffd", text))


def _code(*lines: str) -> str:
    return "<pre><code>" + "\n".join(map(_shown, lines)) + "</code></pre>"


def _page(title: str, body: Sequence[str]) -> bytes:
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,"><title>{_shown(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n'
    )
    return (head + "\n".join(body) + "\n</body></html>\n").encode()
