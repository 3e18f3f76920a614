"""Libraries of another version than an integration is written for: refused by a sentence, before they are imported."""

from __future__ import annotations

import importlib
import pathlib
import re
import sys
import tomllib

import pytest

from transfuse.integrations import check_series

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A place whose distributions come before all others. They are nothing but names and versions."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name == "transfuse.integrations.vllm"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def install(place: pathlib.Path, name: str, version: str) -> None:
    (place / f"{name}-{version}.dist-info").mkdir()
    (place / f"{name}-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    importlib.invalidate_caches()


@pytest.mark.parametrize("version", ["0.34.0", "0.31.2", "0.320.0", "1.0"])
def test_another_vllm_is_refused(installed: pathlib.Path, version: str) -> None:
    install(installed, "vllm", version)
    said = f"is written for vllm 0.32 and 0.33, and vllm {version} is installed: pip install 'transfuse[vllm]'"
    with pytest.raises(ImportError, match=re.escape(said)):
        importlib.import_module("transfuse.integrations.vllm")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.33.1.dev3+cpu", None])
def test_those_of_the_series_pass(installed: pathlib.Path, version: str | None) -> None:
    if version is not None:
        install(installed, "alibrary", version)
    check_series("alibrary", "0.32", "0.33")


def test_the_extra_asks_for_the_same() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / "src/transfuse/integrations/vllm.py").read_text()
    series = re.search(r'^SERIES = \("(\d+)\.(\d+)", "\1\.(\d+)"\)$', text, re.M)
    assert series is not None
    major, first, last = series[1], int(series[2]), int(series[3])
    assert extras["vllm"] == [f"vllm>={major}.{first},<{major}.{last + 1}"]
