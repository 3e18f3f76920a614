"""docs/comparison.md: what it says of installed libraries and marks with ‡ is asked of these libraries.

A question is skipped where its library is not installed. That every mark has a question is checked everywhere.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "comparison.md").read_text()
MARK = "‡"
DEADLINE = 120.0

Question = Callable[[Path], None]


# -------------------------------------------------------------------------------------------------- vLLM


def in_vllm(name: str) -> Question:
    """A backend of this name is registered by vLLM itself, from a module of its own."""

    def ask(tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # What vLLM's imports warn of is not ours.
            reason = "needs vLLM: make vllm"
            factory = pytest.importorskip(
                "vllm.distributed.weight_transfer.factory", exc_type=ImportError, reason=reason
            )
        loader = factory.WeightTransferEngineFactory._registry[name]
        assert inspect.getclosurevars(loader).nonlocals["module_path"].startswith("vllm.")

    return ask


def modelexpress_is_re_exported(tmp_path: Path) -> None:
    """The module in vLLM has no engine of its own: it imports one, and says so where that is missing."""
    in_vllm("modelexpress")(tmp_path)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    load = WeightTransferEngineFactory._registry["modelexpress"]
    if importlib.util.find_spec("modelexpress_rl") is None:
        with pytest.raises(ImportError, match="requires ModelExpress"):
            load()
    else:
        assert load().__module__.startswith("modelexpress")


# -------------------------------------------------------------------------------------------------- Ray


def a_failed_transfer_kills_no_actor(tmp_path: Path) -> None:
    """Ray kills the actors of a failed transfer if their transport cannot abort it. Ours can, GLOO and NCCL cannot."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'transfuse[ray]'")
    from ray.experimental.rdt.collective_tensor_transport import GLOOTensorTransport, NCCLTensorTransport

    from transfuse.integrations.ray import TransfuseTransport

    assert not GLOOTensorTransport.can_abort_transport()
    assert not NCCLTensorTransport.can_abort_transport()
    assert TransfuseTransport.can_abort_transport()


# -------------------------------------------------------------------------------------------------- huggingface_hub

#: In a process of its own: the library reads its endpoint when it is imported.
DOWNLOAD = """
import huggingface_hub
print(huggingface_hub.__version__)
print(huggingface_hub.hf_hub_download("some/model", "model.safetensors"))
"""


@contextmanager
def hub_of(sent: bytes, size: int, promised: bytes) -> Iterator[str]:
    """A Hub with one file: HEAD gives this size and the SHA-256 of what was promised, GET gives what is sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.head(size)

        def do_GET(self) -> None:
            self.head(len(sent))
            self.wfile.write(sent)

        def head(self, length: int) -> None:
            self.send_response(200)
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("ETag", f'"{hashlib.sha256(promised).hexdigest()}"')
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def download(home: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", DOWNLOAD],
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def the_client_compares_sizes_and_no_checksums(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub 2.4.0")
    promised, other = b"what the ETag is of", b"other bytes instead"
    with hub_of(other, len(promised), promised) as endpoint:
        ended = download(tmp_path / "other", endpoint)
    assert ended.returncode == 0, ended.stderr
    version, path = ended.stdout.split()
    assert Path(path).read_bytes() == other
    # It is refused when the size is another.
    with hub_of(other[:-1], len(promised), promised) as endpoint:
        ended = download(tmp_path / "short", endpoint)
    assert ended.returncode != 0
    assert f"should be of size {len(promised)}" in ended.stderr
    if version != "2.4.0":
        pytest.skip(f"the page says it of huggingface_hub 2.4.0; {version}, which is installed here, does the same")


# -------------------------------------------------------------------------------------------------- every mark

#: The row, the column and the question of each mark in a table, and the text and the question of each other one.
CELLS: dict[tuple[str, str], Question] = {
    ("how an engine meets it", "vLLM `nccl`"): in_vllm("nccl"),
    ("how an engine meets it", "vLLM `sharded_rdt`"): in_vllm("sharded_rdt"),
    ("how an engine meets it", "NVIDIA ModelExpress"): modelexpress_is_re_exported,
    ("a failed actor of Ray is killed", "transfuse"): a_failed_transfer_kills_no_actor,
}
SENTENCES: dict[str, Question] = {
    "`huggingface_hub` 2.4.0, the client of all of these, compares sizes and no checksums": (
        the_client_compares_sizes_and_no_checksums
    ),
}


def marks(page: str) -> tuple[set[tuple[str, str]], set[str]]:
    """The rows and columns of marked cells, and the text before each other mark in its line."""
    cells, sentences = set(), set()
    columns: list[str] = []
    for before, line in zip(["", *page.splitlines()], page.splitlines(), strict=False):
        if not line.startswith("|"):
            sentences |= {text.strip() for text in line.split(MARK)[:-1]}
            continue
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if not before.startswith("|"):
            columns = [re.sub(r"†.*", "", cell).strip() for cell in row]
        cells |= {(row[0], columns[i]) for i, cell in enumerate(row) if MARK in cell}
    return cells, sentences


def test_every_mark_has_a_question() -> None:
    cells, sentences = marks(PAGE)
    assert cells == CELLS.keys()
    explained = {one for one in sentences if one.endswith("that are marked")}
    assert len(explained) == 1, "the page says once what the mark is"
    assert sentences - explained == SENTENCES.keys()


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: ": ".join(cell))
def test_a_marked_cell(cell: tuple[str, str], tmp_path: Path) -> None:
    CELLS[cell](tmp_path)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_marked_sentence(sentence: str, tmp_path: Path) -> None:
    SENTENCES[sentence](tmp_path)
