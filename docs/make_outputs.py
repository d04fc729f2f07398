"""Run the guide in an empty folder and put the numbers that it prints now into its blocks of text.

    PYTHONPATH=$PWD/src:$PWD/tests python docs/make_outputs.py

Only numbers change; it fails if words differ. Run it after a change of defaults, and read the sentences around the
blocks again.
"""

import os
import re
import sys
import tempfile

from doc_pages import ROOT, outputs_of_the_guide, refreshed

PAGE = ROOT / "docs" / "guide.md"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        for shown, said in outputs_of_the_guide():
            text = text.replace(shown, refreshed(shown, said))
        os.chdir(ROOT)
    PAGE.write_text(re.sub(r" +$", "", text, flags=re.MULTILINE), encoding="utf-8")


if __name__ == "__main__":
    main()
