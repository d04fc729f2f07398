"""The programs of docs/extending-data.md run as they stand there."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "extending-data.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs(number, capsys):
    exec(PROGRAMS[number], {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_what_is_said_of_sizes_is_so(capsys):
    exec(PROGRAMS[3], {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "torch.Size([4810]) torch.Size([650])" in said
    assert "[(64, 64), (64,), (10, 64), (10,)]" in said
