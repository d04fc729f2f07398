"""Messages that are changed at random, for the server, a team and a device: they refuse them, and nothing else."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import torch

from network_tree import Tree, data
from polytier.engines.network.contents import Limits
from polytier.engines.network.message import KINDS, Message, Refused, decode, encode
from polytier.engines.network.parent import Question
from polytier.runs.admission import Admission, hello
from polytier.runs.job import make_job
from polytier.runs.loop import make_loop
from short_methods import short

LARGEST = 1 << 20
NODES = ("device/d0", "team/t0")
ODD: list[Any] = [None, True, -1, 0, 1 << 62, 1 << 70, 1.5, "", "x" * 200, "device", "server", [], [1], {}, {"a": 1}]


def changed(message: Message, draw: random.Random) -> bytes:
    """A message with another fact, tensor or kind, or with other bytes."""
    facts, tensors, kind = copy.deepcopy(message.facts), dict(message.tensors), message.kind
    how = draw.randrange(6)
    if how == 0:
        facts[draw.choice([*facts, "more"])] = draw.choice(ODD)
    elif how == 1 and facts:
        facts.pop(draw.choice(list(facts)))
    elif how == 2 and tensors:
        name = draw.choice(list(tensors))
        tensors[name] = draw.choice(
            [torch.full((48,), 255, dtype=torch.uint8), torch.zeros(3), torch.zeros(0), torch.full((2, 4), -1)]
        )
    elif how == 3 and tensors:
        tensors.pop(draw.choice(list(tensors)))
    elif how == 4:
        kind = draw.choice([each for each in KINDS if each != "failed"])
    whole = bytearray(encode(Message(kind, facts, tensors)))
    if how == 5:
        for _ in range(draw.randint(1, 8)):
            whole[draw.randrange(len(whole))] = draw.randrange(256)
        if draw.random() < 0.3:
            del whole[draw.randrange(len(whole)) :]
    return bytes(whole)


def fuzz(number: int, seed: int = 0) -> Counter[str]:
    """Send `number` messages in all; returns how many were refused, answered or without effect, by receiver.

    Raises:
        Exception: Something else than a refusal happened.
    """
    draw, found = random.Random(seed), Counter()
    with make_loop(short("permfl"), data(), "mclr", batch_size=4, seed=3) as loop:
        tree = Tree(loop)
        asked, answered = recorded(tree)
        questions, ask = [], tree.server._question
        tree.server._question = lambda *given: questions.append(ask(*given)) or questions[-1]  # type: ignore[method-assign]
        loop.run(1)
        for k in range(number):
            receiver = ("device", "team", "server", "gate")[k % 4]
            if receiver in ("device", "team"):
                name = NODES[receiver == "team"]
                outcome = to_node(tree, name, changed(draw.choice(asked[name]), draw))
            elif receiver == "server":
                outcome = to_parent(tree, questions[-1], draw.choice(answered), draw)
            else:
                outcome = to_gate(draw)
            found[f"{receiver}: {outcome}"] += 1
    return found


def recorded(tree: Tree) -> tuple[dict[str, list[Message]], list[Message]]:
    """Note what is asked of a team and a device, and what teams answer."""
    asked: dict[str, list[Message]] = {name: [] for name in NODES}
    answered: list[Message] = []
    for name, above in zip(NODES, ("team/t0", "server"), strict=True):

        def handle(data: bytes, name: str = name) -> bytes:
            asked[name].append(decode(data, 1 << 30))
            answer = tree.nodes[name].handle(data)
            if name.startswith("team") and decode(answer, 1 << 30).kind == "answer":
                answered.append(decode(answer, 1 << 30))
            return answer

        tree.hubs[above].dial(name, handle)
    return asked, answered


def to_node(tree: Tree, name: str, data: bytes) -> str:
    try:
        answer = decode(tree.nodes[name].handle(data), 1 << 30)
    except Refused:
        return "refused"
    if answer.kind not in ("answer", "measured", "absent", "failed"):
        raise AssertionError(f"{name} answers {answer.kind}")
    return "answered"


def to_parent(tree: Tree, question: Question, message: Message, draw: random.Random) -> str:
    """An answer of a team that was asked; a refusal closes its link, which is opened again."""
    hub, name, number = tree.hubs["server"], "team/t0", message.facts["number"]
    handle, before = hub.children[name], dict(hub.closed)
    hub.closed.pop(name, None)
    taken: dict[str, Any] = {}
    tree.server.asked[name] = {number}
    tree.server._take((name, changed(message, draw)), {name: (name, number)}, question, taken, {})
    refused = name in hub.closed
    hub.dial(name, handle)
    hub.closed = before
    return "refused" if refused else "answered" if taken else "without effect"


def to_gate(draw: random.Random) -> str:
    """What a child says first."""
    job = make_job({"algorithm": "fedavg"}, {"devices": ["ann"], "shape": [3], "classes": 3}, "a fuzz")
    gate = Admission(job, job.tree, 0, Limits(largest=LARGEST))
    try:
        message = decode(changed(hello(["device/ann"]), draw), LARGEST)
        if message.kind != "hello":
            raise Refused("no hello")
        gate.admit("device/ann", message)
    except Refused:
        return "refused"
    return "answered"


if __name__ == "__main__":
    for what, count in sorted(fuzz(10_000).items()):
        print(what, count)
