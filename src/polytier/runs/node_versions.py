"""What a node says of its versions when it joins, and which versions work together."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polytier._terminal import event
from polytier.engines.network.message import Refused

log = logging.getLogger("polytier")
PROTOCOL = 1  # of messages; tests/fixtures has those of each version that has to be understood
BITS = ("torch", "processor")  # what the bits of results depend on


def own_versions() -> dict[str, Any]:
    """The protocol, the package, torch and the processor of this node."""
    from polytier import __version__

    return {"protocol": PROTOCOL, "polytier": __version__, "torch": torch.__version__, "processor": processor()}


def processor() -> str:
    """The kind of processor, with the instructions that torch uses."""
    names, file = [], Path("/proc/cpuinfo")
    if file.exists():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {names[0] if names else ''}".strip()


def check_versions(theirs: Mapping[str, Any]) -> None:
    """Raise `Refused` for a node whose versions do not work with those here.

    Versions of polytier work together if the first number is the same and the second one differs by at most 1.
    """
    own, protocol = own_versions(), theirs.get("protocol")
    if protocol != PROTOCOL:
        raise Refused(f"it speaks protocol {protocol}, this node {PROTOCOL}; install the same version of polytier")
    here, there = (numbers(str(about.get("polytier"))) for about in (own, theirs))
    if here is None or there is None or here[0] != there[0] or abs(here[1] - there[1]) > 1:
        raise Refused(
            f"it has polytier {str(theirs.get('polytier'))[:40]}, this node {own['polytier']}; install versions that "
            "are at most one minor version apart"
        )


def numbers(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version."""
    parts = version.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and all(p.isdecimal() for p in parts[:2]) else None


def warn_of_bits(peer: str, theirs: Mapping[str, Any]) -> None:
    """Log a warning if results may have other bits than on equal machines."""
    own = own_versions()
    for name in BITS:
        if str(theirs.get(name)) != own[name]:
            text = "%s has %s %s, this node %s: results may differ in their last bits from those of equal machines"
            log.warning(text, peer, name, str(theirs.get(name))[:80], own[name], extra=event("versions", peer))
