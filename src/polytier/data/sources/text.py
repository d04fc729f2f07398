"""Text in files: a file is a device, a folder of files is a team.

Documents are joined by an end token and cut into samples of `context` tokens. The target of a token is the next one.
Documents are split into training, validation and test before they are joined, so that no document is in two splits.
"""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from polytier._errors import unknown
from polytier.data import IGNORED
from polytier.data.federation import split_by_shares
from polytier.data.population import SPLITS
from polytier.data.sources.files import default_dir
from polytier.data.sources.source import Source
from polytier.data.tokens import BPE, BYTES, Tokenizer, make_tokenizer
from polytier.files.read import reading

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}  # others are not packed
ENDINGS = (".txt", ".text")
SHUFFLE = 0xB4  # random numbers of the order of documents have a key of their own


@dataclass(frozen=True)
class Holding:
    """The documents of one device, as token ids."""

    device: str
    team: str | None
    documents: list[np.ndarray]


@dataclass(frozen=True)
class TextSource(Source):
    """Samples of tokens, which depend on how documents are split: `of_split` makes them.

    Args:
        holdings: the documents of each device.
        tokenizer: what made their ids.
        context: the number of tokens of a sample.
    """

    holdings: Sequence[Holding] = field(default=(), kw_only=True)
    tokenizer: Tokenizer = field(default=Tokenizer(None, 256, 257), kw_only=True)
    context: int = field(default=0, kw_only=True)

    def of_split(self, shares: tuple[float, float, float], seed: int) -> TextSource:
        """The samples when the documents of each device are split by `shares`.

        Raises:
            ValueError: a device has too few documents for a split.
        """
        sizes = [len(each.documents) for each in self.holdings]
        part = np.split(split_by_shares(np.repeat(np.arange(len(sizes)), sizes), shares, seed), np.cumsum(sizes)[:-1])
        xs, ys, owner, split = [], [], [], []
        for k, holding in enumerate(self.holdings):
            for number, name in enumerate(SPLITS):
                chosen = [holding.documents[i] for i in np.flatnonzero(part[k] == number)]
                if not chosen and shares[number] > 0:
                    raise ValueError(
                        f"device {holding.device} has {len(holding.documents)} documents, too few for {name} samples "
                        f"with the split {':'.join(f'{s:g}' for s in shares)}; give it more documents (blank lines "
                        "separate documents; in a file without blank lines each line is one), or change --split"
                    )
                x, y = pack(chosen, self.context, self.tokenizer.end)
                xs.append(x)
                ys.append(y)
                owner += [k] * len(x)
                split += [number] * len(x)
        named = np.array([each.device for each in self.holdings])[owner]
        teams = [each.team for each in self.holdings]
        team = None if None in teams else np.array(teams)[owner]
        x, y = np.concatenate(xs), np.concatenate(ys)
        return replace(self, x=x, y=y, device=named, team=team, cluster=team, split=np.array(split))


def text(
    data_dir: Path | None = None,
    *,
    folder: str = "",
    context: int = 128,
    tokenizer: str = BYTES,
    files: str = "",
    parts: int = 1,
    tokens: int = 0,
    digest: str = "",
) -> TextSource:
    """Text of your own: FOLDER/NAME.txt is a device, FOLDER/TEAM/NAME.txt a device in a team; also .txt.gz, .txt.xz.

    Blank lines separate documents; in a file without blank lines each line is one. They are joined by an end token
    and cut into samples of `context` tokens, whose targets are the next tokens. A tokenizer that is trained here
    (bpe:SIZE) sees all documents, those for testing too.

    Args:
        data_dir: where FOLDER is searched if it is no path; without FOLDER, DIR/text and DIR are searched.
        folder: the folder with the files.
        context: the number of tokens of a sample.
        tokenizer: bytes, bpe:SIZE, or that of a model: its folder, its .gguf file or a tokenizer.json.
        files: only these files, by name without ending, joined by "+"; by default all.
        parts: divide each file among so many devices; without folders, each file is then a team.
        tokens: at most so many tokens per device, without the end tokens; 0: all.
        digest: what the tokenizer must have; runs record it, so that a run is not repeated with another one.

    Raises:
        ValueError: there are no files, a file is empty or not text, or the tokenizer does not exist or has changed.
    """
    for name, value, least in (("parts", parts, 1), ("tokens", tokens, 0)):
        if value < least:
            raise ValueError(f"{name} of text must be {least} or more; got {value}")
    home, is_path = find_folder(folder, data_dir)
    found = chosen_files(home, files)
    documents = {path: read_documents(path) for path in found}
    made = make_tokenizer(tokenizer, [line for each in documents.values() for line in each])
    check_digest(made, tokenizer, digest)
    holdings = []
    for path, (team, name) in found.items():
        holdings += share(name, team, documents[path], made, parts, tokens)
    rest = [f"files={files}"] * bool(files) + [f"parts={parts}"] * (parts > 1) + [f"tokens={tokens}"] * (tokens > 0)
    where = [f"folder={absolute(home) if is_path else folder}"] * bool(folder)  # data_dir is a setting of its own
    settings = [*where, f"context={context}", *rest, tokenizer_setting(made, tokenizer)]
    return text_source(holdings, made, context, f"text:{','.join(settings)}")


def text_source(holdings: Sequence[Holding], tokenizer: Tokenizer, context: int, setting: str) -> TextSource:
    """The source of these documents; until `of_split` is called, all samples are for training.

    Raises:
        ValueError: the context is below 1.
    """
    if context < 1:
        raise ValueError(f"context must be 1 or more tokens; got {context}")
    nothing = np.zeros((0, context), np.int64)
    empty = TextSource(
        nothing, nothing, tokenizer.size, setting=setting, holdings=holdings, tokenizer=tokenizer, context=context
    )
    return empty.of_split((1, 0, 0), 0)


def tokenizer_setting(tokenizer: Tokenizer, name: str) -> str:
    """The arguments that find the same tokenizer again: its name, with an absolute path, and its digest."""
    known = name == BYTES or name.startswith(BPE)
    return f"tokenizer={name if known else absolute(Path(name).expanduser())},digest={tokenizer.digest}"


def absolute(path: Path) -> Path:
    """The absolute path; an error if it has a comma, which separates the arguments of a data set."""
    if "," in str(path.resolve()):
        raise ValueError(f"{path.resolve()} has a comma in its path, which separates arguments; rename the folder")
    return path.resolve()


def check_digest(tokenizer: Tokenizer, name: str, digest: str) -> None:
    """Raise an error if a tokenizer is not the one with this digest; an empty digest fits all."""
    if digest not in ("", tokenizer.digest):
        raise ValueError(
            f"the tokenizer {name} has the digest {tokenizer.digest}, not {digest}: it is not the one of the first "
            "run; give that one, or leave out digest to start anew"
        )


def pack(documents: Sequence[np.ndarray], context: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """[N, T] inputs and targets: documents one after another, each followed by the end token.

    Every token of a document, and the end token after it, is a target once. The first input is the end token. The last
    sample is filled with end tokens, whose targets are `IGNORED`.

    Examples:
        >>> x, y = pack([np.array([1, 2, 3]), np.array([4])], context=4, end=9)
        >>> x.tolist(), y.tolist()
        ([[9, 1, 2, 3], [9, 4, 9, 9]], [[1, 2, 3, 9], [4, 9, -100, -100]])
    """
    after = np.array([end])
    stream = np.concatenate([after, *(part for each in documents for part in (each, after))])
    count = -(-(len(stream) - 1) // context)
    x, y = np.full(count * context, end), np.full(count * context, IGNORED)
    x[: len(stream) - 1], y[: len(stream) - 1] = stream[:-1], stream[1:]
    return x.reshape(count, context), y.reshape(count, context)


def share(
    name: str, team: str | None, documents: list[str], tokenizer: Tokenizer, parts: int, tokens: int
) -> list[Holding]:
    """The devices of one file: its documents in a random order, dealt to `parts` devices.

    The order is the same for every seed of a run, so that the device's text is too; seeds differ in the split.
    """
    # the draws go by the name of the file, so that other files change nothing
    order = np.random.default_rng([SHUFFLE, crc32(name.encode())]).permutation(len(documents))
    found = []
    for part in range(parts):
        ids = tokenizer.encode([documents[int(i)] for i in order[part::parts]])
        if tokens:
            ids = ids[: max(1, int(np.searchsorted(np.cumsum([len(each) for each in ids]), tokens, side="right")))]
        own = team if team is not None or parts == 1 else name
        found.append(Holding(name if parts == 1 else f"{name}-{part + 1}", own, ids))
    return found


# -- files --------------------------------------------------------------------------------------------


def find_folder(folder: str, data_dir: Path | None) -> tuple[Path, bool]:
    """The folder with the text files, and whether it was found as a path, not below `data_dir`."""
    base = default_dir() if data_dir is None else Path(data_dir)
    places = [Path(folder).expanduser(), base / folder] if folder else [base / "text", base]
    for place in places:
        if place.is_dir():
            return place, bool(folder) and place == places[0]
    raise ValueError(f"there is no folder {' or '.join(map(str, places))}; write --data text:FOLDER")


def chosen_files(home: Path, wanted: str) -> dict[Path, tuple[str | None, str]]:
    """The team and the name of each text file, in the order of their names."""
    files = sorted(path for path in home.iterdir() if is_text(path))
    teams = sorted(path for path in home.iterdir() if path.is_dir() and any(map(is_text, path.iterdir())))
    if files and teams:
        raise ValueError(
            f"{home} has text files ({files[0].name}) and folders of text files ({teams[0].name}); put all files "
            "into folders, which are teams, or none"
        )
    found: dict[Path, tuple[str | None, str]] = {path: (None, plain_name(path)) for path in files}
    for team in teams:
        found |= {
            path: (team.name, f"{team.name}/{plain_name(path)}") for path in sorted(team.iterdir()) if is_text(path)
        }
    if not found:
        raise ValueError(
            f"{home} has no text files; put one NAME.txt (or .txt.gz, .txt.xz) per device there, or a folder of them "
            "per team"
        )
    names = [name for _, name in found.values()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{home} has {twice} twice, packed and not; remove one of them")
    for name in wanted.split("+") if wanted else ():
        if name not in names:
            raise unknown("text file", name, names)
    return {path: what for path, what in found.items() if not wanted or what[1] in wanted.split("+")}


def is_text(path: Path) -> bool:
    """Whether this is the name of a text file, packed or not."""
    return path.name.removesuffix(".gz").removesuffix(".xz").endswith(ENDINGS) and path.is_file()


def plain_name(path: Path) -> str:
    """The name of a text file without its endings."""
    return Path(path.name.removesuffix(".gz").removesuffix(".xz")).stem


def read_documents(path: Path) -> list[str]:
    """The documents of a text file.

    Raises:
        ValueError: it is not UTF-8 text, or it is empty.
    """
    opener = OPENERS.get(path.suffix, open)
    with reading(path, "UTF-8 text", "save it as UTF-8"), opener(path, "rb") as file:
        content = file.read().decode("utf-8-sig")
    lines = [line.rstrip() for line in content.strip().splitlines()]
    if "" in lines:
        blocks = "\n".join(lines).split("\n\n")
        lines = [block.strip("\n") for block in blocks]
    found = [line for line in lines if line.strip()]
    if not found:
        raise ValueError(f"{path} is empty; put text there, or remove the file")
    return found
