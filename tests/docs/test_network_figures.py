"""The table of figures in docs/deploy.md is that of docs/results/network.json."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("websockets")

from network_full.run_all import BEGIN, END, PAGE, RESULTS, table


def test_the_figures_of_deploy_are_those_of_the_results():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == table(json.loads(RESULTS.read_text()))
