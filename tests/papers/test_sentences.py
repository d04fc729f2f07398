"""Sentences of the papers rest on claims that their plans have."""

import pytest

from polytier import papers
from polytier.papers.sentences import PARTLY, SENTENCES, THEORY, Sentence, as_claim, counted, state, theory_claims
from polytier.papers.verdicts import FAILS, HOLDS, LEVEL, UNTESTED

BOUNDS = {"permfl-theorem-1", "permfl-theorem-2", "mfa-theorem-1", "mfa-corollary-1"}  # of benchmarks/theory_rates.py


def claims(*states: str) -> list[dict[str, str]]:
    return [{"text": "", "state": each} for each in states]


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_sentence_rests_on_claims_that_exist(paper):
    items = {
        item.name: {
            "claims": [{"text": claim.text, "state": UNTESTED} for claim in item.claims],
            "rows": [{"labels": row.labels, "best": {"verdict": "agrees"}} for row in item.rows],
        }
        for item in papers.items_of(paper, "full")
    }
    theory = {"bounds": {name: {"models": []} for name in BOUNDS}, "samples": {"growing mini-batches": {"high": -1.0}}}
    items[THEORY] = {"claims": theory_claims(theory)}
    for sentence in SENTENCES[paper]:
        for place in sentence.rests:
            assert Sentence("", "", (place,)).claims(items), (sentence.text, place)


def test_a_sentence_has_the_state_of_its_tested_claims():
    assert state([]) == state(claims(UNTESTED)) == UNTESTED
    assert state(claims(HOLDS, UNTESTED)) == state(claims(HOLDS, LEVEL)) == HOLDS
    assert state(claims(LEVEL, UNTESTED)) == LEVEL
    assert state(claims(FAILS, FAILS)) == FAILS
    assert state(claims(FAILS, HOLDS)) == PARTLY
    assert counted(claims(HOLDS, FAILS, HOLDS, UNTESTED)) == "2 holds, 1 does not hold, 1 not tested"


def test_rows_and_theorems_are_claims():
    row = {"labels": ["MNIST", "FedAvg"], "best": {"verdict": "lower"}}
    assert as_claim(row) == {"text": "MNIST, FedAvg", "state": FAILS}
    assert as_claim({**row, "best": {"verdict": "higher"}})["state"] == HOLDS
    assert as_claim({**row, "best": {"verdict": "not comparable"}})["state"] == UNTESTED
    good, bad = {"keeps": True, "broken": []}, {"keeps": True, "broken": ["beta > 1 / mu"]}
    found = theory_claims(
        {
            "bounds": {
                "a": {"models": [good]},
                "b": {"models": [good, bad]},
                "c": {"models": [{**good, "keeps": False}]},
            },
            "samples": {"growing": {"high": -1.0}, "fixed": {"high": -0.5}},
        }
    )
    assert [claim["state"] for claim in found] == [HOLDS, FAILS, FAILS, HOLDS, FAILS]
    assert found[3]["text"] == "O(1/T) with growing"
