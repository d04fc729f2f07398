"""Every script of examples/ runs, and what it prints makes the point it is there for."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def play(tmp_path, monkeypatch, capsys):
    """Run a script as a person does, in a folder of its own; what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *args: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found is not None, text
    return [float(number) for number in found.groups()]


def test_personal_models_beat_one_for_all_and_each_alone(play, tmp_path):
    text = play("compare_methods.py", str(tmp_path))
    alone = numbers(r"alone +([\d.]+)", text)[0]
    everybody = numbers(r"FedAvg\) +- +- +([\d.]+)", text)[0]
    personal, team, _ = numbers(r"PerMFL\) +([\d.]+) +([\d.]+) +([\d.]+)", text)
    assert min(personal, team) > max(alone, everybody) + 2
    assert f"--data {tmp_path / 'machines.npz'}" in text
    assert [path.name for path in tmp_path.iterdir()] == ["machines.npz"]


def test_a_method_of_ones_own_beats_what_it_was_made_from(play):
    text = play("own_method.py")
    assert "TeamDitto keeps the contract" in text
    alone = numbers(r"Local +personal +([\d.]+)", text)[0]
    ditto = numbers(r"\nDitto +personal +([\d.]+)", text)[0]
    personal, team = numbers(r"TeamDitto +personal +([\d.]+)  team +([\d.]+)", text)
    assert min(personal, team) > max(alone, ditto) + 5


def test_a_method_is_written_in_30_lines():
    source = (EXAMPLES / "own_method.py").read_text()
    method = source[source.index("@dataclass") : source.index("if __name__")].strip()
    assert method.count("\n") < 30


def test_four_tiers_fit_better_the_nearer_they_are(play):
    text = play("four_tiers.py")
    shown = [numbers(rf"model of the {tier} +([\d.]+)", text)[0] for tier in ("server", "region", "site", "device")]
    assert shown == sorted(shown)
    assert shown[-1] > shown[0] + 8
    links = ("server-team1", "team1-team2", "team2-device")
    top, middle, bottom = (numbers(rf"{link} +(\d+)", text.replace(",", ""))[0] for link in links)
    assert 5 * top < middle < bottom / 5


def test_three_models_together_take_fewer_rounds(play):
    text = play("three_models.py")
    rounds = [int(number) for number in re.findall(r"take 30 rounds one after another, (\d+) together", text)]
    assert len(rounds) == 2
    assert max(rounds) < 20
    assert numbers(r"gain: ([\d.]+)", text)[0] == pytest.approx(sum(30 / r for r in rounds) / 2, abs=0.01)


def test_learned_teams_are_the_true_kinds_and_beat_random_ones(play, tmp_path):
    text = play("learned_teams.py", str(tmp_path / "cobo"))
    teams = re.findall(r"teams, by the kinds of their devices: (.*)", text)[1].split(" | ")
    assert sorted(teams) == ["0 0 0 0", "1 1 1 1", "2 2 2 2", "3 3 3 3"]
    random, learned = (float(number) for number in re.findall(r"accuracy: personal ([\d.]+)", text))
    assert learned > random + 15
    assert (tmp_path / "cobo" / "collaboration.npz").exists()


def test_a_comparison_is_drawn(play, tmp_path):
    found = {"mean": 0.8, "low": 0.7, "high": 0.9}
    methods = [
        {"method": "permfl", "personal": found, "team": found, "global": found},
        {"method": "local", "personal": found, "team": None, "global": None},
    ]
    (tmp_path / "compare.json").write_text(json.dumps({"methods": methods}))
    assert play("plot_comparison.py", str(tmp_path), "-o", "drawn.png") == "wrote drawn.png\n"
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
