"""What is written about metrics, and asked of them, against what a server answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server_harness import serving
from test_metrics import fetched

from kvledger.machine.peaks import MachinePeaks
from kvledger.server import Server

ROOT = Path(__file__).parents[2]
# tools/setup.sh puts it beside the interpreter.
PROMTOOL = shutil.which("promtool", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (tools/setup.sh check puts it into .venv)"
)
# Served only with TLS.
TLS_ONLY = {"kvledger_certificate_expiry_timestamp_seconds": ("gauge", frozenset[str]())}
# What the collector adds to each series, and what an operator's relabelling does.
ADDED = {"instance", "app"}


@dataclass
class Served:
    """What a server answered: the text, and each family's type and labels."""

    text: str
    families: dict[str, tuple[str, frozenset[str]]] = field(default_factory=dict)
    samples: dict[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for family in text_string_to_metric_families(self.text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels: set[str] = set()
            for sample in family.samples:
                self.samples[sample.name] = frozenset(sample.labels)
                labels |= sample.labels.keys() - {"le"}
            self.families[name] = (family.type, frozenset(labels))

    def of(self, prefix: str) -> dict[str, tuple[str, frozenset[str]]]:
        return {name: what for name, what in self.families.items() if name.startswith(prefix)}


async def _answer(tmp_path: Path, patch: pytest.MonkeyPatch, *arguments: str) -> Served:
    measured = partial(Server, peaks=MachinePeaks.given(20e9, 160e9))
    patch.setattr("server_harness.Server", measured)
    books = ("--books", str(tmp_path), "--metrics-listen", "127.0.0.1:0")
    async with serving(*books, *arguments) as server:
        await server.answer(text="a" * 30, max_tokens=8)
        await server.until(lambda: not server.server._admission.open_requests)
        address = server.server.metrics_address
        assert address is not None
        return Served(await asyncio.to_thread(fetched, address))


@pytest_asyncio.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """All that is there besides aliases."""
    return await _answer(tmp_path, monkeypatch)


def listed(prefix: str) -> dict[str, tuple[str, frozenset[str]]]:
    """The metrics of docs/metrics.md, as its tables say."""
    rows = re.findall(
        r"^\| `(\w+)(?:\{([\w,]+)\})?` \| (\w+) \|",
        (ROOT / "docs/metrics.md").read_text(),
        re.MULTILINE,
    )
    found = {
        name: (kind, frozenset(labels.split(",")) if labels else frozenset[str]())
        for name, labels, kind in rows
        if name.startswith(prefix)
    }
    assert len(found) == len([name for name, _, _ in rows if name.startswith(prefix)]), "twice"
    return found


def panels() -> list[dict[str, Any]]:
    """The dashboard's charts."""
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    """The rules."""
    groups = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Every query of the repository: where it stands, and what it asks."""
    for panel in panels():
        for target in panel["targets"]:
            asked = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            yield f"grafana.json: {panel['title']}", asked
    for rule in alerts():
        yield f"alerts.yaml: {rule['alert']}", rule["expr"]
    for page in ("metrics", "autoscaling"):
        text = (ROOT / f"docs/{page}.md").read_text()
        for asked in re.findall(r"`([^`\n]*kvledger_[^`\n]*[(\[>][^`\n]*)`", text):
            yield f"{page}.md", asked
        for asked in re.findall(r"query: (>-(?:\n {10}.*)+|.*)", text):
            yield f"{page}.md", " ".join(asked.removeprefix(">-").split())


def test_every_metric_is_on_the_page_and_served(served: Served) -> None:
    """An operator would look for what is not there, or never hear of what is."""
    ours = served.of("kvledger_")
    assert len(ours) > 70
    assert listed("kvledger_") == {**ours, **TLS_ONLY}


async def test_every_alias_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dashboard made for another server would be empty where the page says it is not."""
    served = await _answer(tmp_path, monkeypatch, "--metrics-aliases", "vllm")
    text = (ROOT / "docs/metrics.md").read_text()
    on_the_page = set(re.findall(r"^\| `(vllm:\w+)` \|", text, re.MULTILINE))
    assert on_the_page == served.of("vllm:").keys()
    assert all("model_name" in labels for _, labels in served.of("vllm:").values())
    # What each is worked out from is there too.
    for source in re.findall(r"^\| `vllm:.*", text, re.MULTILINE):
        assert set(re.findall(r"kvledger_\w+", source)) <= served.families.keys()


def test_without_being_asked_there_are_no_aliases(served: Served) -> None:
    """Names that break Prometheus' rules would be served to everybody."""
    assert served.of("vllm:") == {}


def test_queries_ask_for_what_is_served(served: Served) -> None:
    """A chart would be empty, an alert never ring, a replica never come."""
    asked = list(queries())
    assert len(asked) > 70
    places = {place.partition(":")[0] for place, _ in asked}
    assert places == {"grafana.json", "alerts.yaml", "metrics.md", "autoscaling.md"}
    known = {**served.samples, **{name: labels for name, (_, labels) in TLS_ONLY.items()}}
    for place, query in asked:
        names = re.findall(r"\bkvledger_\w+", re.sub(r"\"[^\"]*\"", '""', query))
        assert names, f"{place}: {query}"
        assert set(names) <= known.keys(), f"{place}: {query}"
        labels = set().union(*(known[name] for name in names)) | ADDED
        for group in re.findall(r"\b(?:by|on) \(([\w, ]+)\)", query):
            assert set(group.split(", ")) <= labels, f"{place}: {query}"
        for name, matchers in re.findall(r"\b(kvledger_\w+)\{([^}]*)\}", query):
            matched = set(re.findall(r"(\w+)=", matchers))
            assert matched <= known[name] | ADDED, f"{place}: {query}"


def test_values_that_queries_match_exist(served: Served) -> None:
    """An alert on a reason that is spelled otherwise would never ring."""
    for place, query in queries():
        for name, matchers in re.findall(r"\b(kvledger_\w+)\{([^}]*)\}", query):
            for label, values in re.findall(r"(\w+)=~?\"([^\"]*)\"", matchers):
                if label in ADDED:
                    continue
                for value in values.split("|"):
                    sample = rf'^{name}\{{(?:[^}}]*,)?{label}="{re.escape(value)}"'
                    assert re.search(sample, served.text, re.MULTILINE), f"{place}: {value}"


def test_legends_name_labels_that_their_query_keeps() -> None:
    """All lines of a chart would have the same name."""
    for panel in panels():
        for target in panel["targets"]:
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in kept or not kept, panel["title"]


def test_the_dashboard_has_no_overlaps_and_says_what_it_shows() -> None:
    """Charts would lie on each other, or be read as something else."""
    places: set[tuple[int, int]] = set()
    for panel in json.loads((ROOT / "deploy/grafana.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert places.isdisjoint(cells), panel["title"]
        places |= cells
        assert panel["type"] == "row" or panel["description"], panel["title"]


def test_shares_of_time_are_of_one_server() -> None:
    """Two servers that are half idle would look as busy as they can be."""
    shares = [
        (panel["title"], target["expr"])
        for panel in panels()
        if panel["fieldConfig"]["defaults"].get("unit") == "percentunit"
        for target in panel["targets"]
        if "_seconds_total" in target["expr"] and " / " not in target["expr"]
    ]
    assert [title for title, _ in shares] == ["Time of steps"]
    for title, asked in shares:
        assert asked.startswith("avg by"), title


def test_charts_of_ended_requests_say_so() -> None:
    """All of an hour-long request at its end would be taken for what it holds at this moment."""
    charts = [
        panel
        for panel in panels()
        if re.search(r"kvledger_tenant_(block|compute)_seconds", panel["targets"][0]["expr"])
    ]
    assert len(charts) == 2
    for panel in charts:
        assert "ended requests" in panel["title"]
        assert "at its end" in panel["description"], panel["title"]


def test_alerts_say_what_is_wrong_and_how_bad() -> None:
    """Whoever is woken would not know why."""
    assert len({rule["alert"] for rule in alerts()}) == len(alerts()) >= 10
    for rule in alerts():
        assert rule["annotations"]["summary"], rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]


def _promtool(*arguments: str, given: str | None = None) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], input=given, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@needs_promtool
def test_promtool_finds_nothing_in_what_is_served(served: Served) -> None:
    """Names and types would break rules that tools rely on."""
    assert _promtool("check", "metrics", given=served.text) == ""
    broken = served.text.replace("kvledger_kv_pool_bytes", "kvledger_kv_pool_mb")
    assert _promtool("check", "metrics", given=broken) != "", "the lint looks at nothing"


@needs_promtool
def test_promtool_reads_every_query(tmp_path: Path) -> None:
    """Prometheus would not start with the rules, or a chart show an error."""
    assert _promtool("check", "rules", str(ROOT / "deploy/alerts.yaml")) == ""
    rules = [{"record": f"asked:{i}", "expr": asked} for i, (_, asked) in enumerate(queries())]
    path = tmp_path / "asked.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    assert _promtool("check", "rules", str(path)) == ""
