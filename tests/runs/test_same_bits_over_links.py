"""The methods that are compared over each network have the bits of the simulation over TLS and through a broker."""

from __future__ import annotations

import pytest

pytest.importorskip("websockets")
pytest.importorskip("paho.mqtt")

from brokers import MISSING, MOSQUITTO
from network_threads import METHODS, OTHERS, PARTS, REGIONS, ROUNDS, check_bits, other

BROKER = pytest.mark.skipif(MOSQUITTO is None, reason=MISSING)
NETWORKS = pytest.mark.parametrize("mqtt", [False, pytest.param(True, marks=BROKER)], ids=["websocket", "mqtt"])


@NETWORKS
@pytest.mark.parametrize("name", METHODS)
def test_methods_have_the_bits_of_the_simulation_over_links(tmp_path, name, mqtt):
    """Half of the nodes take part; `make network` compares with all of them too."""
    check_bits(tmp_path, mqtt, **METHODS[name], **PARTS["half"])


@pytest.mark.parametrize("name", OTHERS)
def test_all_other_methods_have_the_bits_of_the_simulation_over_links(tmp_path, name):
    check_bits(tmp_path, False, **other(name))


@NETWORKS
def test_four_tiers_and_gateways_have_the_bits_of_the_simulation(tmp_path, mqtt):
    network = {"gateways": {"lab": ["d0", "d2"]}}
    check_bits(tmp_path, mqtt, algorithm="permfl", set=ROUNDS, teams=REGIONS, network=network)
