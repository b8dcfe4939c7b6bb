"""Each dashboard against Grafana's own types (npm: @grafana/schema), by the TypeScript compiler.

It takes the dashboard's form and each panel's options and field settings; what a data source adds
to an annotation or a query has no type there."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.dashboards.grafana import boards

RELEASES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
TYPES = "@grafana/schema/dist/types/raw"
HEAD = f"""
import type {{ AnnotationQuery, Dashboard }} from "./node_modules/{TYPES}/dashboard/x/types.gen";
import type * as stat from "./node_modules/{TYPES}/composable/stat/panelcfg/x/types.gen";
import type * as timeseries from
  "./node_modules/{TYPES}/composable/timeseries/panelcfg/x/types.gen";
import type * as heatmap from "./node_modules/{TYPES}/composable/heatmap/panelcfg/x/types.gen";
import type * as table from "./node_modules/{TYPES}/composable/table/panelcfg/x/types.gen";
// A file has an enum's value, not its name.
type Plain<T> = T extends string ? `${{T}}` : T extends number ? number : T extends boolean ? T :
  T extends Array<infer One> ? Array<Plain<One>> :
  T extends object ? {{ [K in keyof T]: Plain<T[K]> }} : T;
type Annotated = Plain<AnnotationQuery> & {{ expr: string, titleFormat: string }};
type Board = Omit<Plain<Dashboard>, "annotations"> & {{ annotations: {{ list: Annotated[] }} }};
"""


def program(texts: list[str]) -> str:
    """Every dashboard, and each panel's settings, as values of their types."""
    lines = [HEAD]
    for text in texts:
        board: dict[str, Any] = json.loads(text)
        name = board["uid"].replace("-", "_")
        lines.append(f"const {name}: Board = {text};")
        for one in board["panels"]:
            kind, place = one["type"], f"{name}_{one['id']}"
            custom = one["fieldConfig"]["defaults"]["custom"]
            lines.append(f"const {place}: Plain<{kind}.Options> = {json.dumps(one['options'])};")
            if kind != "stat":  # has no settings of a field
                lines.append(
                    f"const {place}_c: Partial<Plain<{kind}.FieldConfig>> = {json.dumps(custom)};")
    return "\n".join(lines)


def judged(folder: Path, programs: dict[str, str]) -> dict[str, int]:
    """How many errors each program has."""
    for name, text in programs.items():
        (folder / f"{name}.ts").write_text(text)
    tsc = folder / "node_modules/typescript/bin/tsc"
    done = subprocess.run(
        ["node", str(tsc), "--noEmit", "--strict", "--skipLibCheck", "--target", "es2020",
         "--module", "preserve", *(f"{name}.ts" for name in programs)],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout, done.stderr)
    return {name: done.stdout.count(f"{name}.ts(") for name in programs}


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("npm is missing: the dashboards are not checked against Grafana's types")
    folder = tmp_path_factory.mktemp("schema")
    (folder / "package.json").write_text('{"private": true}')
    done = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-save", *RELEASES],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"npm has no {' '.join(RELEASES)}: {done.stderr[-200:]}")
    return folder


WRONG = {"number": ('"graphTooltip": 1', '"graphTooltip": "1"'),
         "name": ('"keepTime"', '"keepsTime"'),
         "option": ('"colorMode": "value"', '"colorMode": "loud"'),
         "field": ('"spanNulls": false', '"spanNulls": "no"'),
         "stack": ('"mode": "normal"', '"mode": "up"')}


def test_grafanas_types_take_every_dashboard_and_no_wrong_one(schema: Path) -> None:
    texts = boards.files()
    run = texts["holdfast-run.json"]
    assert all(right in run for right, _ in WRONG.values())
    wrong = {name: program([run.replace(*pair)]) for name, pair in WRONG.items()}
    found = judged(schema, {"good": program(list(texts.values())), **wrong})
    assert found.pop("good") == 0
    assert all(found.values()), found
