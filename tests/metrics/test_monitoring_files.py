"""One table of names: the page, the dashboard, the alerts and the runbook say what it says, and real keepers tell it.

`promtool` reads what Prometheus is to read, where it is installed (Debian: `apt-get install prometheus`).
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml

from keeping import Home, Job, home, same, threaded, until  # noqa: F401
from scraping import Scrape, metrics_of, scrape
from transfuse._keeper import measured
from transfuse._metrics import names, shared_file
from transfuse._metrics.names import Family
from transfuse._metrics.samples import Samples
from transfuse._report import Report

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "packaging" / "monitoring"
PAGE = (ROOT / "docs" / "metrics.md").read_text()
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
TABLE = {family.name: family for family in (*names.KEEPER, *names.WORKERS_OWN)}
#: Labels that Prometheus gives to what it scrapes.
PROMETHEUS_OWN = {"job", "instance"}
#: What only a keeper that saves steps tells.
SAVED = {family.name for family in (names.SAVED_STEP, names.SAVE_TIME, names.SAVE_FAILURES)}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool: apt-get install prometheus"
)


def rules() -> Iterator[tuple[str, str]]:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def panels() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


EXPRESSIONS = [*rules(), *panels()]


def family_of(sample: str) -> Family:
    """The metric that a sample belongs to."""
    for name in (sample, *(sample.removesuffix(end) for end in ("_bucket", "_sum", "_count"))):
        family = TABLE.get(name)
        if family is not None and (name == sample) == (family.kind in ("counter", "gauge")):
            return family
    raise AssertionError(f"there is no {sample}")


def labels_of(family: Family, sample: str) -> set[str]:
    return {*family.labels, *PROMETHEUS_OWN, *({"le"} if sample.endswith("_bucket") else ())}


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_every_name_and_label_exists(where: str, expression: str) -> None:
    found = re.findall(r"\btransfuse_[a-z_]+\b(?:\{([^}]*)\})?", expression)
    assert found, where
    known: set[str] = set()
    for match in re.finditer(r"\b(transfuse_[a-z_]+)\b(?:\{([^}]*)\})?", expression):
        family = family_of(match[1])
        known |= labels_of(family, match[1])
        for label, operator, value in re.findall(r'(\w+)(=~|!=|!~|=)"([^"]*)"', match[2] or ""):
            assert label in labels_of(family, match[1]), f"{match[1]} has no {label}"
            values = family.labels.get(label)
            if values is not None and "$" not in value:
                assert set(value.split("|") if "~" in operator else [value]) <= set(values), f"{label}={value}"
    for by in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression):
        assert {label.strip() for label in by.split(",")} <= known, where


def test_legends_use_labels_that_are_left() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            grouped = re.search(r"\bby \(([^)]*)\)", target["expr"])
            if grouped is not None and wanted:
                assert wanted <= {label.strip() for label in grouped[1].split(",")}, panel["title"]


def test_the_dashboard_has_every_metric_and_fits_the_screen() -> None:
    shown = {family_of(name).name for _, text in panels() for name in re.findall(r"\btransfuse_[a-z_]+\b", text)}
    assert set(TABLE) - shown == {names.RESTORED_STEP.name, names.COMMITTED_AT.name, names.REPLICATED_HOSTS.name}
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


# ------------------------------------------------------------------------------------------------------------ the pages


def rows() -> dict[str, tuple[str, str, str]]:
    """The tables of the page: kind, labels and meaning of each metric."""
    found = re.findall(r"^\| `(transfuse_[a-z_]+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE, re.M)
    assert len({row[0] for row in found}) == len(found)
    return {name: (kind, labels, meaning) for name, kind, labels, meaning in found}


def told_labels(family: Family) -> str:
    parts = []
    for label, values in family.labels.items():
        known = "" if values is None else ": " + ", ".join(f"`{value}`" for value in values)
        parts.append(f"`{label}`{known}")
    return "; ".join(parts)


def test_the_page_has_every_metric_as_the_table_has_it() -> None:
    expected = {name: (family.kind, told_labels(family), family.help) for name, family in TABLE.items()}
    assert rows() == expected


def test_the_runbook_has_a_paragraph_for_each_alert() -> None:
    headings = re.findall(r"^## (.*)$", RUNBOOK, re.M)
    alerts = [alert for alert, _ in rules()]
    assert [heading for heading in headings if heading.startswith("Transfuse")] == alerts
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
            assert rule["labels"]["severity"] in ("critical", "warning")
    for alert in alerts:
        paragraph = RUNBOOK[RUNBOOK.index(f"## {alert}\n") :].split("\n\n")[1]
        for word in ("**Means.**", "**Look at.**", "**Do.**"):
            assert word in paragraph, alert
    for name in re.findall(r"\btransfuse_[a-z_]+\b", RUNBOOK):
        assert name in TABLE or family_of(name), name
    for cause in names.SKIP_CAUSES:
        assert f"`{cause}`" in RUNBOOK, cause


def test_the_extra_that_tests_need_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    for package in ("prometheus-client", "tabulate", "jinja2", "requests", "pyyaml"):
        assert any(re.match(rf"{package}\b", one) for one in declared), package


# -------------------------------------------------------------------------------------------------------- real metrics


@pytest.mark.usefixtures("threaded")
def test_real_keepers_and_workers_tell_every_metric_with_these_labels(
    home: Home,  # noqa: F811
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRANSFUSE_KEEPER_METRICS", "127.0.0.1:0")
    monkeypatch.setenv("TRANSFUSE_METRICS", str(tmp_path / "metrics.prom"))
    monkeypatch.setattr(shared_file, "_files", {})
    for host in ("a", "b"):
        home.start(host)
    (steps := tmp_path / "steps").mkdir()
    states = [{"w": torch.zeros(1000)} for _ in range(2)]
    with Job(2) as job:
        job.start(same(*states), [{"run": host, "directory": str(steps), "save_every": 1} for host in ("a", "b")])
        step = 0

        def is_replicated() -> Scrape | None:
            nonlocal step
            step += 1
            job.commit(step)
            found = scrape(metrics_of(home, "a"))
            names_of_steps = ("keeper_replicated_step", "keeper_confirmed_step", "keeper_save_seconds")
            return found if all(found(name) is not None for name in names_of_steps) else None

        until(is_replicated)
        assert job.restore()
        until(lambda: scrape(metrics_of(home, "a"))("keeper_restores_total"))
        keeper = scrape(metrics_of(home, "a"))
    shared_file._write_all()
    workers = Scrape((tmp_path / "metrics.prom").read_text())
    assert workers("transfers_total")
    told: dict[str, set[str]] = {}
    for found in (keeper, workers):
        for sample, labels in found.label_names.items():
            family = family_of(sample)
            assert labels == set(family.labels) | ({"le"} if sample.endswith("_bucket") else set()), sample
            told[family.name] = labels
    assert set(told) == set(TABLE)
    assert set(told) >= SAVED
    if shutil.which("promtool"):
        for found in (keeper, workers):
            check_metrics(found.text)


def everything() -> str:
    """All metrics with all their labels."""
    samples = Samples(TABLE.values())
    for family in TABLE.values():
        labels = {label: values[0] if values else "x" for label, values in family.labels.items()}
        method: Any = {"counter": samples.add, "gauge": samples.set}.get(family.kind, samples.observe)
        method(family, 1, **labels)
    return samples.text()


def check_metrics(text: str) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_promtool
def test_promtool_has_nothing_to_say_about_the_metrics() -> None:
    check_metrics(everything())
    counted = Samples(names.WORKERS_OWN)
    shared_file.count(counted, Report("send", (1,)))
    check_metrics(counted.text())
    check_metrics(measured.counters().text())


@needs_promtool
@pytest.mark.parametrize("command", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]])
def test_promtool_passes_the_alerts(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout + done.stderr


@needs_promtool
def test_promtool_reads_the_expressions_of_the_dashboard(tmp_path: pathlib.Path) -> None:
    recorded = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "5m")}
        for number, (_, text) in enumerate(panels())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": recorded}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
