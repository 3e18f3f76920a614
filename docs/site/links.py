"""A hook for mkdocs: pages link to files of the repository as they do on GitHub, and the site takes these files along.

`../examples/heal.py` is outside the pages' folder. Such a file is copied into the site as it is, under `repository/`,
and the link leads there. One that does not exist is left to mkdocs, which complains.
"""

from __future__ import annotations

import os
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_page_markdown"]

_LINK = re.compile(r"\]\((?P<target>\.\.?/[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    docs = pathlib.Path(config.docs_dir)
    root = docs.parent
    here = pathlib.PurePosixPath(page.file.src_uri).parent

    def lead(match: re.Match[str]) -> str:
        path = pathlib.Path(os.path.normpath(docs / here / match["target"]))
        if path.is_relative_to(docs) or not path.is_file() or not path.is_relative_to(root):
            return match[0]
        # A page of Markdown would be rendered, and its own links are not those of this site: shown as text.
        uri = f"repository/{path.relative_to(root).as_posix()}" + (".txt" if path.suffix == ".md" else "")
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
        return f"]({os.path.relpath(uri, here)})"

    return _LINK.sub(lead, markdown)
