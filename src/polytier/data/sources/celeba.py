"""CelebA: images of faces with attributes; a person can be a device."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polytier.data.sources.files import find_file, not_found, search_folders
from polytier.data.sources.source import Source
from polytier.files.read import reading


def celeba(
    data_dir: Path | None = None, *, attributes: str = "Smiling", image_size: int = 84, limit: int = 0
) -> Source:
    """CelebA, images of faces; every attribute ("Smiling+Male") is a task of two classes.

    If there is identity_CelebA.txt, each person is a device.

    Args:
        data_dir: where data are kept.
        attributes: one or several of the 40 attributes, joined by "+".
        image_size: images are resized to this height and width.
        limit: read only so many images; 0: all 202,599, which need 4.3 GB at 84x84.

    Raises:
        ValueError: Pillow or files are missing, a file cannot be read, or there is no such attribute.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError('celeba needs an extra to read images: pip install "polytier[images]"') from error
    if image_size < 1 or limit < 0:
        raise ValueError(f"image_size must be above 0 and limit 0 or more; got {image_size} and {limit}")
    places = search_folders(data_dir, "celeba")
    home = next((p for p in places if (p / "img_align_celeba").is_dir()), None)
    listing = find_file("list_attr_celeba.txt", places)
    if home is None or listing is None:
        raise not_found("celeba", ["the folder img_align_celeba and list_attr_celeba.txt"], places)
    files, y = read_attributes(listing, attributes.split("+"))
    files, y = (files[:limit], y[:limit]) if limit else (files, y)
    device = identities(find_file("identity_CelebA.txt", places), files)
    x = np.empty((len(files), 3, image_size, image_size), dtype=np.uint8)
    for row, file in enumerate(files):
        path = home / "img_align_celeba" / file
        with reading(path, "an image"), Image.open(path) as image:
            x[row] = np.asarray(image.convert("RGB").resize((image_size, image_size))).transpose(2, 0, 1)
    y = y.astype(np.int64)
    return Source(x, y[:, 0] if y.shape[1] == 1 else y, 2, device)


def identities(path: Path | None, files: Sequence[str]) -> np.ndarray | None:
    """The number of the person in each image; None if there is no such file."""
    if path is None:
        return None
    with reading(path, "CelebA's identities"):
        person = {line[0]: int(line[1]) for line in read_words(path)}
        absent = [file for file in files if file not in person]
        if absent:
            raise ValueError(f"it has no {absent[0]}")
        return np.array([person[file] for file in files], dtype=np.int64)


def read_attributes(path: Path, wanted: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The names of the image files, and [N, attributes] bool, the wanted columns of list_attr_celeba.txt."""
    with reading(path, "CelebA's attributes"):
        _, names, *lines = read_words(path)  # the first line is the number of images
        for line in lines:
            if len(line) != len(names) + 1:
                raise ValueError(f"the line of {line[0]} does not have {len(names)} attributes")
        values = np.array([line[1:] for line in lines], dtype=np.int64).reshape(-1, len(names)) > 0
    for attribute in wanted:
        if attribute not in names:
            near = difflib.get_close_matches(attribute, names, 3) or names[:5]
            raise ValueError(f"{path} has no attribute {attribute!r}; did you mean {', '.join(near)}?")
    return [line[0] for line in lines], values[:, [names.index(attribute) for attribute in wanted]]


def read_words(path: Path) -> list[list[str]]:
    """The words of each line that is not empty."""
    return [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
