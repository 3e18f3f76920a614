"""Every code block of README and docs is run by some test, every command exists, and every link leads somewhere.

- python: cut out of an example as it stands there, and every example is run by a test; or a file that the reader makes,
  and that is run here; or a whole program that is listed in `RUN_ELSEWHERE`.
- sh and console: make targets, examples, commands of `transfuse` with their options, extras and modules that exist.
- text, json, toml: what is shown, parsed where it can be.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import pathlib
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import typer

import transfuse
from example_outputs import ALONE, ELSEWHERE, EXAMPLES, RANKS, RESTARTED
from transfuse.cli.app import app
from transfuse.testing.ranks import run_program

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]

#: Whole programs in a page, and the test that executes them from there.
RUN_ELSEWHERE = {
    "docs/torchft.md": "dropin/test_dropin_torchft.py",
    "docs/dcp.md": "dropin/test_dcp.py",
    "docs/cli.md": "cli/test_cli_docs.py",
    "docs/integrations/vllm.md": "integrations/test_vllm.py",
    "docs/hub.md": "hub/test_hub_clients.py",
    "docs/storage.md": "keeper/test_storage_page.py",
    "docs/encryption.md": "house/test_encryption_guide.py",
}

#: The longest line of code on a page.
MOST_LETTERS = 120

#: Words that begin a command which is what it says on any machine.
ANYWHERE = {"cd", "echo", "export", "git", "openssl"}


class Block(NamedTuple):
    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.kind}"


def blocks(path: pathlib.Path) -> Iterator[Block]:
    """Fenced blocks. Indented ones are of no kind."""
    page, opened, before = str(path.relative_to(ROOT)), None, ""
    kept: list[str] = []
    listed = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            if opened is None:
                opened = number, line.strip()[3:]
                kept = []
            else:
                yield Block(page, opened[0], opened[1], textwrap.dedent("\n".join(kept)))
                opened = None
        elif opened is not None:
            kept.append(line)
        elif line.startswith("    ") and not before and not listed:
            yield Block(page, number, "", line.strip())
        elif line.strip():
            # What is indented below an item of a list belongs to it.
            listed = bool(re.match(r"\s*([-*]|\d+\.) ", line)) or (listed and line.startswith(" "))
        before = line.strip()
    assert opened is None, f"{page}: a block without an end"


BLOCKS = [block for page in PAGES for block in blocks(page)]


def of_kind(*kinds: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind in kinds]


def excerpts(path: pathlib.Path, length: int) -> Iterator[str]:
    lines = path.read_text().splitlines()
    for start in range(len(lines) - length + 1):
        yield textwrap.dedent("\n".join(lines[start : start + length]))


def file_name(block: Block) -> str | None:
    """A block that begins with `# name.py` is a file that the reader makes."""
    found = re.match(r"# (\w+\.py)\n", block.text)
    return found[1] if found else None


def files(page: str) -> Iterator[tuple[str, str]]:
    """The files of a page, if one of them is run there."""
    found = {file_name(block): block.text for block in of_kind("python") if block.page == page}
    if any(name in found for name, _ in runs(page)):
        yield from ((name, text) for name, text in found.items() if name is not None)


def runs(page: str) -> Iterator[tuple[str, int]]:
    """Programs that a page runs, and on how many ranks."""
    for block in of_kind("sh", "console"):
        for words in commands(block) if block.page == page else ():
            if words[0] == "torchrun" and (ranks := _ranks(words)):
                yield words[-1], ranks
            elif words[0] == "python" and len(words) == 2:
                yield words[1], 1


def _ranks(words: list[str]) -> int | None:
    found = re.search(r"--nproc[-_]per[-_]node[= ](\d+)", " ".join(words))
    return int(found[1]) if found else None


# ------------------------------------------------------------------------------------------------------ code


def test_every_block_has_a_kind() -> None:
    known = {"python", "sh", "console", "text", "json", "toml"}
    assert [str(block) for block in BLOCKS if block.kind not in known] == []
    # Something is seen at all.
    assert len(of_kind("python")) > 20
    assert len(of_kind("sh", "console")) > 5


@pytest.mark.parametrize("block", of_kind("python"), ids=str)
def test_python(block: Block) -> None:
    if (test := RUN_ELSEWHERE.get(block.page)) is not None:
        assert pathlib.Path(block.page).name in (ROOT / "tests" / test).read_text()
        return
    if (name := file_name(block)) is not None:
        assert name in dict(files(block.page)), block.page
        return
    length = block.text.count("\n") + 1
    found = [path for path in EXAMPLES.glob("*.py") if block.text in excerpts(path, length)]
    assert found, f"in no example:\n{block.text}"


def pages_with_files() -> list[Any]:
    """Frameworks take long to import: their pages are run in `make soak`, and their examples each time."""
    found = sorted({block.page for block in BLOCKS if file_name(block) is not None})
    return [pytest.param(page, marks=[pytest.mark.soak] if "integrations" in page else []) for page in found]


@pytest.mark.parametrize("page", pages_with_files())
def test_files_that_the_reader_makes(page: str, tmp_path: pathlib.Path) -> None:
    """Pasted and run as the page says."""
    made = dict(files(page))
    for name, text in made.items():
        (tmp_path / name).write_text(text + "\n")
    for name, ranks in runs(page):
        if name in made and "SIGKILL" not in made[name]:  # What kills itself, test_readme.py runs with restarts.
            ended = run_program(tmp_path / name, ranks)
            assert all(rank.code == 0 for rank in ended), "\n".join(map(str, ended))
            assert any(rank.out for rank in ended), "it says nothing"


def test_every_example_is_run() -> None:
    for path in EXAMPLES.glob("*.py"):
        if path.stem in {check.__name__ for check in (*RANKS, *ALONE, *RESTARTED)}:
            continue
        test = ROOT / "tests" / ELSEWHERE[path.stem]
        assert f'"{path.name}"' in test.read_text(), f"{test.name} does not run {path.name}"


def test_data() -> None:
    for block in of_kind("json"):
        json.loads(block.text)
    for block in of_kind("toml"):
        tomllib.loads(block.text)


# -------------------------------------------------------------------------------------------------- commands


def commands(block: Block) -> Iterator[list[str]]:
    text = block.text.replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip()]
    if block.kind == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
        assert lines, "a console without a line that begins with $"
    for line in lines:
        tokens = shlex.split(line, comments=True)
        for separator, part in itertools.groupby(tokens, lambda token: token in {"&&", "|", ";"}):
            words = [] if separator else list(part)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words and words[-1] == "&":
                words.pop()
            if words:
                yield words


@pytest.mark.parametrize("block", of_kind("sh", "console"), ids=str)
def test_commands(block: Block) -> None:
    for words in commands(block):
        name, rest = pathlib.Path(words[0]).name, words[1:]
        if name == "make":
            targets_and_variables = re.findall(r"^([a-z]+):|^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.M)
            known = set(itertools.chain(*targets_and_variables))
            assert {word.partition("=")[0] for word in rest} <= known, words
        elif name in {"python", "torchrun"}:
            _check_program(name, rest, dict(files(block.page)))
        elif name == "pip":
            _check_install(rest)
        elif name == "transfuse":
            _check_command(rest)
        else:
            assert name in ANYWHERE, f"nothing checks {shlex.join(words)}"


def _check_program(name: str, words: list[str], made: dict[str, str]) -> None:
    """An example that a test runs this way, a file of the page, or a module."""
    if words[:1] == ["-m"]:
        if words[1] == "pytest":
            return
        assert importlib.util.find_spec(words[1]) is not None, words
        return
    if words[:1] == ["-c"]:
        compile(words[1], "<command>", "exec")
        return
    program = next(word for word in words if word.endswith(".py"))
    if program in made:
        return
    assert (ROOT / program).is_file(), words
    example = pathlib.Path(program).stem
    ranks = {check.__name__: count for check, count in (RANKS | RESTARTED).items()}
    if name == "torchrun" and example not in ELSEWHERE:
        assert _ranks(words) == ranks[example], words
    else:
        assert example in {*ranks, *(check.__name__ for check in ALONE), *ELSEWHERE}, words


def _check_install(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[1:]:
        if extras := re.fullmatch(r"(?:transfuse|\.)\[(.+)\]", word):
            assert set(extras[1].split(",")) <= set(project["optional-dependencies"]), words


def _check_command(words: list[str]) -> None:
    """Parsed as the command line would be, and not run."""
    # Of click, or of what typer has taken over from it.
    group: Any = typer.main.get_command(app)
    if not words or words[0].startswith("-"):
        return
    command = group.commands[words[0]]
    try:
        command.make_context(words[0], words[1:])
    except typer.Exit:
        pass  # --help
    except typer.BadParameter as error:
        # A file of the reader's.
        if "does not exist" not in str(error):
            raise AssertionError(f"{shlex.join(words)}: {error}") from error


# ----------------------------------------------------------------------------------------------------- links


def anchors(path: pathlib.Path) -> set[str]:
    """As GitHub makes them."""
    found, fenced = set(), False
    for line in path.read_text().splitlines():
        fenced ^= line.lstrip().startswith("```")
        if not fenced and (heading := re.fullmatch(r"#+ (.*)", line)):
            text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading[1]).lower()
            found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: pathlib.Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`", "code", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        where, _, anchor = target.partition("#")
        file = (path.parent / where).resolve() if where else path
        assert file.exists(), f"{path.name}: {target}"
        assert file.is_relative_to(ROOT.resolve()), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{path.name}: {target}"


# ------------------------------------------------------------------------------------------------- reference


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in transfuse.__all__ if f"::: transfuse.{name}\n" not in text]
    assert [name for name in missing if name != "__version__"] == []
    for name in ("dcp.PeerReader", "dropin.torch.PGTransport", "dropin.torchft.PGTransport", "_limits.Limits"):
        assert f"::: transfuse.{name}\n" in text, name


def test_code_fits_the_window() -> None:
    """`docs/style.css` makes room for this much in a window of 1,280 pixels. What is output is wrapped there."""
    code = [block for block in BLOCKS if block.kind in ("python", "sh", "json", "toml")]
    long = [f"{block}: {line}" for block in code for line in block.text.splitlines() if len(line) > MOST_LETTERS]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_pictures_bring_their_own_background(path: pathlib.Path) -> None:
    """Pages are read in the dark too, and most letters in pictures are black."""
    picture = ElementTree.parse(path).getroot()
    first = next(one for one in picture if one.tag.rpartition("}")[2] not in ("title", "defs", "style", "desc"))
    drawn = {"width": first.get("width"), "height": first.get("height"), "fill": first.get("fill")}
    _, _, width, height = str(picture.get("viewBox")).split()
    assert drawn == {"width": width, "height": height, "fill": "#ffffff"}


def test_the_site_is_built(tmp_path: pathlib.Path) -> None:
    """As `make docs` does: every warning, also about a link, is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site"))
    build(config)
    page = (tmp_path / "site" / "api.html").read_text()
    for name in transfuse.__all__:
        assert name == "__version__" or f'id="transfuse.{name}"' in page, name
    # What is not rendered would be seen as it stands.
    assert not re.search(r":(class|meth|func|attr|mod|data):", page)
    html = "".join(file.read_text() for file in (tmp_path / "site").rglob("*.html"))
    # Read offline: nothing is loaded from elsewhere.
    assert not re.search(
        r'<(script|link|img)[^>]+(src|href)="https?://', re.sub(r'<link rel="canonical"[^>]*>', "", html)
    )


def test_every_file_of_the_rooms_is_on_the_page_that_lists_them() -> None:
    """Rooms whose files are one for each framework or command are listed by what they are."""
    design, keeper = ((ROOT / "docs" / name).read_text() for name in ("design.md", "keeper.md"))
    rooms = design[design.index("## Rooms") : design.index("## Decisions")]
    source = ROOT / "src" / "transfuse"
    listed = [source, *(source / room for room in ("_state", "_state/leaves", "_plan", "_memory", "_wire", "_session"))]
    listed += tuple(source / room for room in ("_remote", "_hub", "_metrics"))
    files = [file for folder in listed for file in folder.glob("*.py")]
    missing = [str(file) for file in files if file.stem != "__init__" and f"`{file.stem}`" not in rooms]
    missing += [
        str(file)
        for file in (source / "_keeper").glob("*.py")
        if file.stem != "__init__" and f"`{file.name}`" not in keeper
    ]
    assert not missing


def test_the_glossary_has_twenty_rows() -> None:
    """A word that only one room uses is explained there."""
    text = (ROOT / "docs" / "design.md").read_text()
    words = text[text.index("## Words") : text.index("## What two ends say")]
    assert len(re.findall(r"^\| ", words, re.M)) - 1 <= 20


#: What reads as translated: name the parameter ("``seconds``", "this number of") or the subject ("a rank that …").
UNUSUAL = re.compile(
    r"\bso (many|long|often)\b|\bwhoever\b|\bsuch that have\b|\bsee above\b|\bthose who\b|(?-i:[a-z`)][.;:] Who [a-z])",
    re.I,
)


def test_sentences_name_their_subjects() -> None:
    rooms = ("src", "tests", "attacks", "benchmarks", "examples")
    sources = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py")) if path != pathlib.Path(__file__)]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*PAGES, ROOT / "CONTRIBUTING.md", *sources]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNUSUAL.search(line) and not line.startswith("TEXT = ")  # What an example's model learns by heart.
    ]
    assert not found, "\n".join(found)
