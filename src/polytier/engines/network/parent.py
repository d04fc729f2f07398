"""A node that calls its children: the engine of the server and of every team."""

from __future__ import annotations

import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polytier._errors import Fault
from polytier._terminal import event
from polytier.data.population import SPLITS
from polytier.engines.exchange import Exchange
from polytier.engines.network.absences import Absence
from polytier.engines.network.contents import UP, Limits, form_key, forms_of, from_tensor, pack_rows, unpack_rows
from polytier.engines.network.message import Message, Refused, decode
from polytier.engines.network.transport import Hub
from polytier.engines.network.world import address, devices_of, places, span, subtree
from polytier.method.call import Call, Diverged
from polytier.method.context import Context
from polytier.stack.rows import Answered, Folded, Rows, as_dict, cat_rows, fold, map_rows, share_of_samples

log = logging.getLogger("polytier")
HEARD, FIELD = "heard", "call"  # under which a parent remembers the last call of each child whose answer it used
PAUSE = 0.2  # seconds between looks at who is there, and at what the own parent wants
MOST_COLUMNS = 256
MOST_SAMPLES = 1 << 40
NUMBERS = 1 << 62

Programs = Mapping[str, Callable[..., Rows]]  # the programs of an evaluation by name


class Superseded(Exception):
    """The parent of a team has asked something else meanwhile."""


@dataclass(frozen=True)
class Patience:
    """How long a parent waits.

    Args:
        device: Seconds for an answer of a device.
        team: Seconds for an answer of a team, which calls its devices several times.
        quorum: Share of the nodes asked in a call that have to answer, at least one; a parent waits for so many.
    """

    device: float = 60.0
    team: float = 600.0
    quorum: float = 0.5


@dataclass(frozen=True)
class Question:
    """What is asked of some nodes.

    Args:
        deadline: Seconds for an answer.
        make: The message for a node, given its address and the number of the question.
        read: What to keep of an answer; raises `Refused`.
        need: So many have to answer.
    """

    deadline: float
    make: Callable[[str, int], Message]
    read: Callable[[str, Message], Any]
    need: int


class Parent:
    """Runs the programs of children that are other processes. It is the engine of a context.

    Args:
        context: The world of this node; if there are several models, the context above them.
        exchange: How rows travel.
        tier: Tier of this node by model; a model in whose tree this node is not is left out.
        hub: The links to the children.
        limits: What messages may contain.
        programs: The programs of an evaluation by name.
        patience: How long to wait for answers.
        newer: Whether this node's own parent has asked something else.
    """

    remote, workers = False, 1

    def __init__(
        self,
        context: Context,
        exchange: Exchange,
        tier: Mapping[str, int],
        hub: Hub,
        *,
        limits: Limits,
        programs: Programs,
        patience: Patience,
        newer: Callable[[], bool] = lambda: False,
    ) -> None:
        self.context, self.exchange, self.tier, self.hub = context, exchange, tier, hub
        self.limits, self.programs, self.patience, self.newer = limits, programs, patience, newer
        self.absences: list[Absence] = []  # a team sends its own up with its answer
        self.tiles = {part.name: 1 for part in context.parts}
        self.chain: list[int] | None = None  # of the call that is being answered; the server has none
        self.below: dict[str, list[str]] = {}  # who is there below each team, as its last answer said
        self.newcomers: dict[str, list[int]] = {}  # devices that have come since the run started, and their samples
        self.asked: dict[str, set[int]] = {}  # by link: numbers of questions that have not been answered yet
        self._late: dict[str, str] = {}  # who missed a deadline and was not heard from since, and over which link

    def use_workers(self, workers: int) -> None:
        """Change nothing: the nodes are elsewhere."""

    def close(self) -> None:
        """Do nothing: links are closed by whoever opened them."""

    def present(self) -> list[str]:
        """The nodes below that can be called: children now, others as their team last said."""
        part = self.context.parts[0]
        children = places(part.topology, self.tier[part.name] + 1)
        there = [name for name in children if self.hub.link_of(name) is not None]
        return [*there, *(name for child in there for name in self.below.get(child, ()))]

    # -- training ------------------------------------------------------------------------------------

    def deliver(self, call: Call) -> Iterator[Answered | Folded | Rows]:
        """Run the program of a call at its receivers; see `Engine.deliver`."""
        if call.quiet:
            yield from self._evaluate(call)
            return
        if not len(call.ids):
            return
        part = self.context.scope(call.scope)
        groups: dict[int, list[int]] = {}
        for receiver, node in enumerate(call.ids.tolist()):
            groups.setdefault(node, []).append(receiver)
        names = {address(part.topology, call.tier, node): node for node in groups}
        question = self._question(part, call, groups, names)
        answers, reasons = self._ask(question, list(names))
        self._refuse_odd(answers, reasons)
        for name, why in reasons.items():
            tier, _, own = name.partition("/")
            clock, method = call.clock, str(call.method)
            self.absences.append(Absence(clock.round + 1, clock.call, tier, own, method, call.scope, why))
        receivers, pieces = [], []
        for name, node in names.items():
            if name in answers:
                number, rows, message = answers[name]
                part.memory.write(call.tier, HEARD, torch.tensor([node]), torch.tensor([number]), FIELD)
                self._add_up(part, call, node, message)
                receivers += groups[node]
                pieces.append(rows)
        if not pieces:
            return
        which, order = torch.tensor(receivers).sort()
        rows = map_rows(lambda r: r[order], cat_rows(pieces))
        if call.blocks is None:
            yield Answered(rows, which)
            return
        shares = share_of_samples(part.samples[call.tier][call.ids[which]], call.sender[which])
        blocks = torch.unique_consecutive(call.blocks[which], return_inverse=True)[1]
        yield fold(rows, shares, blocks)

    def _question(self, part: Context, call: Call, groups: dict[int, list[int]], names: dict[str, int]) -> Question:
        ids = torch.tensor(list(groups))
        zeros = torch.zeros(len(ids), dtype=torch.int64)
        heard = dict(zip(groups, part.memory.read(call.tier, HEARD, ids, zeros, FIELD).tolist(), strict=True))
        chain, packed = [call.clock.round] if self.chain is None else self.chain, {}

        def make(name: str, number: int) -> Message:
            node = names[name]
            senders = tuple(call.sender[groups[node]].tolist())
            if senders not in packed:
                own = map_rows(lambda r: r[list(senders)], call.rows)
                packed[senders] = pack_rows(own, len(senders), lambda field: self.exchange.codec.plain)
            facts, tensors, _ = packed[senders]
            if call.only is not None:
                tensors = {**tensors, "only": call.only[devices_of(part.topology, call.tier, node)]}
            about = {"method": call.method, "round": call.clock.round, "call": call.clock.call, "scope": call.scope}
            place = {"node": name, "tier": call.tier, "number": number, "chain": chain, "heard": heard[node]}
            return Message("call", {**about, **place, **facts, "receivers": len(senders)}, tensors)

        def read(name: str, message: Message) -> tuple[int, Rows, Message]:
            receivers = torch.tensor(groups[names[name]])
            alone = replace(call.take(receivers), blocks=None, shares=None)
            rows, sizes = unpack_rows(
                message,
                lambda field: self.exchange.codec_of(self.context, alone, field),
                lambda forms: self.limits.check(form_key(call, UP), forms),
                len(receivers),
            )
            if self.exchange.codec.change:
                alone = replace(alone, rows=self.exchange.down(alone.rows))
                rows = self.exchange.incoming(self.context, alone, rows)
            check_traffic(message, part, call.tier, names[name])
            message.facts["absent"] = read_absences(message)
            message.facts["newcomers"] = read_newcomers(message)
            message.facts["present"] = read_present(message, part, call.tier, names[name])
            down = sum(packed[tuple(call.sender[receivers].tolist())][2])
            message.facts["bytes"] = (down, sum(sizes))
            return message.whole("number"), rows, message

        each = call.method != "solve" and any(len(r) == len(call.ids) > 1 for r in as_dict(call.rows).values())
        need = len(names) if each else max(1, math.ceil(self.patience.quorum * len(names)))
        return Question(self._deadline(part, call.tier), make, read, need)

    def _refuse_odd(self, answers: dict[str, Any], reasons: dict[str, str]) -> None:
        """Leave out answers whose fields differ from those of most others."""
        forms = {name: repr(sorted(forms_of(rows).items())) for name, (_, rows, _) in answers.items()}
        if len(set(forms.values())) > 1:
            usual = Counter(forms.values()).most_common(1)[0][0]
            for name in [name for name, form in forms.items() if form != usual]:
                self.hub.forget(self.hub.link_of(name) or name, "its answer has other fields than those of most nodes")
                del answers[name]
                reasons[name] = "refused"

    def _add_up(self, part: Context, call: Call, node: int, message: Message) -> None:
        """Count the bytes of a call and of all calls below it, and the steps of the devices."""
        own, (down, up) = torch.tensor([node]), message.facts["bytes"]
        part.ledger.add(call.tier, "down", own, torch.tensor([down]))
        part.ledger.add(call.tier, "up", own, torch.tensor([up]))
        part.device_steps += message.whole("steps")
        firsts = [low for low, _ in span(part.topology, call.tier, node)]
        for tier, place, sent, got in message.tensors["traffic"].tolist():
            which = torch.tensor([firsts[tier] + place])
            part.ledger.add(tier, "down", which, torch.tensor([sent]))
            part.ledger.add(tier, "up", which, torch.tensor([got]))
        for line in message.facts["absent"]:
            self.absences.append(line)
        self.below[address(part.topology, call.tier, node)] = message.facts["present"]
        self.newcomers |= message.facts["newcomers"]

    # -- evaluation ----------------------------------------------------------------------------------

    def _evaluate(self, call: Call) -> Iterator[Answered | Rows]:
        """Answer a quiet call: only the programs of an evaluation, which all devices run."""
        name = next((name for name, program in self.programs.items() if program is call.method), None)
        if name is None:
            raise ValueError(f"{call.method} cannot be run over a network; it is none of {', '.join(self.programs)}")
        part = self.context.scope(call.scope)
        rows = {field: value[:1] for field, value in as_dict(call.rows).items()}
        which, fields = self.measure(part, name, call.clock.round, rows)
        yield Answered({name: fields[name] for name in sorted(fields, key=place_of)}, which) if fields else {}

    def measure(self, part: Context, program: str, round_: int, rows: dict[str, Tensor]) -> tuple[Tensor, dict]:
        """Let all devices below this node run a program of an evaluation.

        Returns:
            [k] which devices answered, and the fields of their answers [k, columns].
        """
        tier = self.tier[part.name] + 1
        nodes = {address(part.topology, tier, node): node for node in range(part.topology.size(tier))}
        everyone, zeros = torch.arange(len(nodes)), torch.zeros(len(nodes), dtype=torch.int64)
        heard = part.memory.read(tier, HEARD, everyone, zeros, FIELD).tolist()
        tensors = {f"r:{name}": value.clone() for name, value in rows.items()}  # it may be sent later

        def make(name: str, number: int) -> Message:
            about = {"program": program, "round": round_, "scope": part.name, "node": name, "tier": tier}
            return Message("measure", {**about, "number": number, "heard": heard[nodes[name]]}, tensors)

        def read(name: str, message: Message) -> tuple[Tensor, dict[str, Tensor]]:
            return read_measured(message, len(devices_of(part.topology, tier, nodes[name])))

        answers, _ = self._ask(Question(self._deadline(part, tier), make, read, 0), list(nodes))
        firsts = {name: span(part.topology, tier, node)[-1][0] for name, node in nodes.items()}
        found = [(firsts[name] + answers[name][0], answers[name][1]) for name in nodes if name in answers]
        return joined(found)

    # -- questions and answers -----------------------------------------------------------------------

    def _ask(self, question: Question, names: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Ask nodes until enough have answered.

        Returns:
            What was read of the answers, by address, and why the others are absent.
        """
        answers: dict[str, Any] = {}
        waiting = False
        while True:
            missing = [name for name in names if name not in answers]
            reasons = self._ask_once(question, missing, answers)
            if len(answers) >= question.need:
                return answers, reasons
            if not waiting:
                some = ", ".join(f"{name} ({why})" for name, why in list(reasons.items())[:5])
                text = "waiting: %d of %d answers are needed; absent: %s"
                log.warning(text, question.need, len(names), some, extra=event("waiting"))
                waiting = True
            self._look()
            self.hub.sleep(PAUSE)

    def _ask_once(self, question: Question, names: list[str], answers: dict[str, Any]) -> dict[str, str]:
        """Ask nodes once and add what they answer; returns why the others did not."""
        while (came := self.hub.wait(0)) is not None:  # late answers to earlier questions
            self._take(came, {}, question, answers, {})
        asked: dict[str, tuple[str, int]] = {}
        reasons: dict[str, str] = {}
        for name in names:
            if self._late.get(name) == self.hub.link_of(name) is not None:
                reasons[name] = "late"
                continue
            self._late.pop(name, None)
            number = secrets.randbelow(NUMBERS) + 1
            link = self.hub.ask(name, question.make(name, number))
            if link is None:
                reasons[name] = "not connected"
            else:
                asked[name] = link, number
                self.asked.setdefault(link, set()).add(number)
        end = self.hub.now() + question.deadline
        while asked and (left := end - self.hub.now()) > 0:
            came = self.hub.wait(min(left, PAUSE))
            if came is not None:
                self._take(came, asked, question, answers, reasons)
            self._look()
        for name, (link, _) in asked.items():
            reasons[name], self._late[name] = "deadline", link
        return reasons

    def _deadline(self, part: Context, tier: int) -> float:
        return self.patience.device if tier == part.topology.leaf else self.patience.team

    def _look(self) -> None:
        if self.newer():
            raise Superseded

    def _take(
        self,
        came: tuple[str, bytes | bytearray | None],
        asked: dict[str, tuple[str, int]],
        question: Question,
        answers: dict[str, Any],
        reasons: dict[str, str],
    ) -> None:
        """Use what came over a link."""
        link, data = came
        try:
            if data is None:
                self.asked.pop(link, None)
                raise ConnectionError("link closed")
            message = decode(data, self.limits.largest)
            name, number = message.fact("node", str), message.whole("number")
            if self.hub.link_of(name) != link:
                raise Refused(f"it speaks for {name[:60]!r}, which it is not")
            if number not in self.asked.get(link, ()):
                raise Refused("it answers what it was not asked, or a second time")
            self.asked[link].remove(number)
            self._late.pop(name, None)
            if asked.get(name) != (link, number):
                return  # an answer to a question that is no longer asked
            if message.kind == "absent":
                reasons[name] = str(message.facts.get("why"))[:60]
            elif message.kind == "failed":
                raise failure(message)
            elif message.kind in ("answer", "measured"):
                answers[name] = question.read(name, message)
            else:
                raise Refused(f"it answers with a message {message.kind}")
            del asked[name]
        except (Refused, ConnectionError) as error:
            if isinstance(error, Refused):
                self.hub.forget(link, str(error))
            why = "refused" if isinstance(error, Refused) else "link closed"
            for name in [name for name, (its, _) in asked.items() if its == link]:
                reasons[name] = why
                del asked[name]


# -- what answers contain -----------------------------------------------------------------------------


def failure(message: Message) -> Exception:
    """The error that a node below has met. It ends the run."""
    text = str(message.facts.get("text"))[:1000]
    diverged = message.facts.get("diverged")
    if isinstance(diverged, list) and len(diverged) == 4 and isinstance(diverged[2], list):
        round_, tier, nodes, why = diverged
        if isinstance(round_, int) and str(tier).rstrip("0123456789") in ("server", "team", "device"):
            return Diverged(round_, str(tier), [str(node)[:100] for node in nodes[:100]], str(why)[:1000])
    return Fault(f"{message.facts.get('node')}: {text}")


def check_traffic(message: Message, part: Context, tier: int, node: int) -> None:
    """Raise `Refused` unless an answer says what was sent below the node, in nodes of its own world."""
    message.whole("steps", most=1 << 40)
    traffic = message.tensors.get("traffic")
    if traffic is None or traffic.dtype != torch.int64 or traffic.ndim != 2 or traffic.shape[1] != 4:
        raise Refused("an answer does not say what was sent below")
    sizes = torch.tensor([high - low for low, high in span(part.topology, tier, node)])
    if len(traffic):
        tiers, places, down, up = traffic.T
        inside = bool(((tiers > tier) & (tiers < len(sizes))).all()) and bool((places >= 0).all())
        most = 1 << 50
        if not inside or bool((places >= sizes[tiers.clamp(0, len(sizes) - 1)]).any()):
            raise Refused("an answer counts messages of nodes that are not below")
        if bool(((down < 0) | (up < 0) | (down > most) | (up > most)).any()):
            raise Refused("an answer counts impossible numbers of bytes")


def read_absences(message: Message) -> list[Absence]:
    """The absences that a team noted during a call."""
    found = []
    for line in from_tensor(message, "absences"):
        kinds = (int, int, str, str, str, str, str)
        if not isinstance(line, list) or len(line) != 7 or not all(map(isinstance, line, kinds)):
            raise Refused("an answer has absences that cannot be read")
        found.append(Absence(*line))
    return found


def read_newcomers(message: Message) -> dict[str, list[int]]:
    """Devices that a team says have come, and their samples by split; the roster says whether they may."""
    found = from_tensor(message, "newcomers") if "newcomers" in message.tensors else {}
    if not isinstance(found, dict) or not all(is_count(count) for count in found.values()):
        raise Refused("an answer has newcomers that cannot be read")
    return found


def is_count(count: Any) -> bool:
    """Whether this may be the number of samples of a device by split; it has some for training."""
    fits = isinstance(count, list) and len(count) == len(SPLITS)
    return fits and all(type(n) is int and 0 <= n < MOST_SAMPLES for n in count) and count[0] >= 1


def read_present(message: Message, part: Context, tier: int, node: int) -> list[str]:
    """The nodes that a team says are there below it; of a device none."""
    if "present" not in message.tensors:
        return []
    found, tree = from_tensor(message, "present"), subtree(part.topology, tier, node)
    known = {name for t in range(tier + 1, tree.num_tiers) for name in places(tree, t)}
    if not isinstance(found, list) or not all(isinstance(name, str) and name in known for name in found):
        raise Refused("an answer says that nodes are there which are not below")
    return found


def read_measured(message: Message, devices: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Which devices [k] answered an evaluation, and the fields of their answers [k, columns]."""
    which = message.tensors.get("which")
    if which is None or which.dtype != torch.int64 or which.ndim != 1 or len(which) > devices:
        raise Refused("an evaluation does not say whose it is")
    if len(which) and (int(which.min()) < 0 or int(which.max()) >= devices or bool((which.diff() <= 0).any())):
        raise Refused("an evaluation is of devices that are not below")
    fields = {k.removeprefix("f:"): v for k, v in message.tensors.items() if k.startswith("f:")}
    for value in fields.values():
        if value.dtype != torch.float64 or value.ndim != 2 or len(value) != len(which):
            raise Refused("an evaluation has values of another form")
        if value.shape[1] > MOST_COLUMNS or len(fields) > MOST_COLUMNS:
            raise Refused("an evaluation has too many values")
    return which, fields


def place_of(name: str) -> tuple[int, str, int]:
    """The place of a field MODEL.SPLIT of an evaluation, as a simulation orders them."""
    model, _, split = name.rpartition(".")
    return {"personal": 0, "team": 1, "global": 3}.get(model, 2), model, SPLITS.index(split) if split in SPLITS else 0


def joined(found: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The answers of several children as one; a device without samples of a split has zeros."""
    whose = torch.cat([which for which, _ in found]) if found else torch.zeros(0, dtype=torch.int64)
    widths = {name: value.shape[1] for _, fields in found for name, value in fields.items()}
    result = {}
    for name, width in widths.items():
        zeros = (torch.zeros(len(which), width, dtype=torch.float64) for which, _ in found)
        pieces = [fields.get(name, zero) for (_, fields), zero in zip(found, zeros, strict=True)]
        if any(piece.shape[1] != width for piece in pieces):
            raise Fault(f"devices answer an evaluation with different metrics ({name}); install the same version")
        result[name] = torch.cat(pieces)
    return whose, result
