"""Download public data sets. A download can be resumed; a file is used only if it has the published digest."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polytier.data.sources import GENERATED, SOURCES, default_dir
from polytier.files.read import reading

Progress = Callable[[int, int | None], None]  # called with the bytes that are there, and the total if it is known


@dataclass(frozen=True)
class Download:
    """A public file.

    Args:
        url: where it is.
        digest: as published, "md5:..." or "sha256:...".
        members: the files to unpack of a zip archive; none: it is no archive.
    """

    url: str
    digest: str
    members: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Its name."""
        return self.url.rsplit("/", 1)[-1]


def idx_files(url: str, *digests: str) -> tuple[Download, ...]:
    """The four idx files of MNIST and data sets like it."""
    files = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return tuple(Download(f"{url}/{f}", f"md5:{md5}") for f, md5 in zip(files, digests, strict=True))


EMNIST = Download(
    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    "md5:58c8d27c78d21e728a6bc7b3cc06412e",
    tuple(
        f"emnist-{kind}-{part}-{what}-ubyte.gz"
        for kind in ("digits", "byclass")
        for part in ("train", "test")
        for what in ("images-idx3", "labels-idx1")
    ),
)

DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "mnist": idx_files(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion-mnist": idx_files(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "emnist-digits": (EMNIST,),
    "emnist-byclass": (EMNIST,),
    "cifar-10": (
        Download("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"),
    ),
    "cifar-100": (
        Download("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"),
    ),
}

BY_HAND = {
    "digits": "digits come with the package; there is nothing to get",
    **{name: f"data of {name} are generated; there is nothing to get" for name in GENERATED},
    "sentences": "sentences come with the package; there is nothing to get",
    "celeba": "CelebA has to be downloaded by hand from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html: put the "
    "folder img_align_celeba, list_attr_celeba.txt and, to have persons as devices, identity_CelebA.txt into {}",
    "leaf": "LEAF data are made by its own scripts, https://github.com/TalwalkarLab/leaf: put the folders "
    "train and test with the json files into {}",
    "text": "text is your own: put one NAME.txt per device into {}, or name another folder: --data text:FOLDER",
}


def get(name: str, data_dir: Path | str | None = None, progress: Progress | None = None) -> Path:
    """Download the files of a source. Files that are there already are not downloaded again.

    Args:
        name: of the source.
        data_dir: the folder of all data; by default $POLYTIER_DATA or ~/.cache/polytier.
        progress: called with the number of bytes so far, and the total if it is known.

    Returns:
        The folder with the files: DIR/NAME, or DIR/emnist for both EMNIST sources.

    Raises:
        ValueError: there is no such source, it cannot be downloaded, or a file does not have its digest.
    """
    base = default_dir() if data_dir is None else Path(data_dir)
    if name in BY_HAND:
        raise ValueError(BY_HAND[name].format(base / name))
    if name not in DOWNLOADS:
        raise ValueError(f"no data {name!r}; available: {', '.join({**DOWNLOADS, **SOURCES})}")
    folder = base / ("emnist" if name.startswith("emnist-") else name)
    for item in DOWNLOADS[name]:
        wanted = item.members or (item.file,)
        if not all((folder / file).exists() for file in wanted):
            if not (folder / item.file).exists():
                fetch(item, folder, progress or (lambda done, total: None))
            if item.members:
                unpack(folder / item.file, item.members)
    return folder


def fetch(item: Download, folder: Path, progress: Progress) -> None:
    """Download a file to FILE.part, continue where an earlier attempt stopped, and rename it if the digest is right.

    Raises:
        ValueError: the connection failed, or the digest is another one.
    """
    target = folder / item.file
    part = target.with_name(target.name + ".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        total = receive(item.url, part, progress)
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"{item.url} cannot be downloaded: {error}. Try again to continue where it stopped, or put {item.file} "
            f"into {folder} yourself"
        ) from error
    size = part.stat().st_size
    if total is not None and size < total:
        raise ValueError(f"{item.url} stopped after {size:,} of {total:,} bytes; try again to continue")
    found = digest_of(part, item.digest.split(":")[0])
    if found != item.digest:
        part.unlink()
        raise ValueError(
            f"{item.url} gave a file with {found}, published is {item.digest}; it was removed. Try again, or "
            f"put {item.file} into {folder} yourself"
        )
    part.replace(target)


def receive(url: str, part: Path, progress: Progress) -> int | None:
    """Append the missing bytes to the part; returns the full size, or None if the server does not say it."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416:
            raise
        return None  # there is nothing left to send: the part is complete, or the digest will show that it is wrong
    with answer:
        span = answer.headers.get("Content-Range", "")
        resumed = answer.status == 206 and span.startswith(f"bytes {have}-")
        done = have if resumed else 0
        length = answer.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with open(part, "ab" if resumed else "wb") as file:
            progress(done, total)
            while block := answer.read(1 << 18):
                file.write(block)
                done += len(block)
                progress(done, total)
    return total


def digest_of(path: Path, kind: str) -> str:
    """Of a file; `kind` is md5 or sha256."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
    return f"{kind}:{found.hexdigest()}"


def unpack(archive: Path, members: tuple[str, ...]) -> None:
    """Unpack these files of a zip archive, without its folders, and remove the archive."""
    with reading(archive, "a zip archive"), zipfile.ZipFile(archive) as content:
        names = {Path(name).name: name for name in content.namelist()}
        for member in members:
            part = archive.with_name(member + ".part")
            with content.open(names[member]) as inside, open(part, "wb") as outside:
                shutil.copyfileobj(inside, outside)
            part.replace(archive.with_name(member))
    archive.unlink()
