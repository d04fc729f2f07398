"""A node that is called by its parent: a device, or a team with a `Parent` of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from polytier._terminal import event
from polytier.engines.exchange import Exchange
from polytier.engines.network.contents import (
    DOWN,
    Limits,
    allowed_programs,
    as_tensor,
    form_key,
    pack_rows,
    unpack_rows,
)
from polytier.engines.network.message import Message, Refused, decode, encode
from polytier.engines.network.parent import Parent, Programs, Superseded
from polytier.engines.network.versions import Lost, Versions
from polytier.messages.ledger import WAYS, Ledger
from polytier.method.call import Call, Clock, Diverged
from polytier.method.context import Context
from polytier.method.execute import execute
from polytier.stack.rows import Rows, as_dict, cat_rows

log = logging.getLogger("polytier")
LONGEST_CHAIN = 16  # tiers
KeepModel = Callable[[str, str, Tensor], None]  # model, kind ("personal", "team") and its row [d]


class Node:
    """Runs the programs of one node of the tree.

    Args:
        address: How messages name it.
        context: Its world; if there are several models, a context with theirs as scopes.
        tier: Its tier by model.
        exchange: How rows travel.
        limits: What messages may contain.
        programs: The programs of an evaluation by name. "personal" makes the personal model, which stays here.
        versions: Its rows by model.
        keep_model: Called with each model of this node when training ends.
        parent: What a team calls its children with.
    """

    def __init__(
        self,
        address: str,
        context: Context,
        tier: Mapping[str, int],
        exchange: Exchange,
        *,
        limits: Limits,
        programs: Programs,
        versions: Mapping[str, Versions],
        keep_model: KeepModel = lambda model, kind, row: None,
        parent: Parent | None = None,
    ) -> None:
        self.address, self.context, self.tier, self.exchange = address, context, tier, exchange
        self.limits, self.programs, self.versions = limits, programs, versions
        self.keep_model, self.parent = keep_model, parent
        self.allowed = {part.name: allowed_programs(part.algorithm) for part in context.parts}

    def handle(self, data: bytes) -> bytes:
        """Answer a message of the parent.

        Raises:
            Refused: The message is not valid; its sender is cut off.
        """
        message = decode(data, self.limits.largest)
        return encode(self.answer(message))

    def answer(self, message: Message) -> Message:
        """Answer a message of the parent."""
        scope = message.fact("scope", str)
        if message.fact("node", str) != self.address or scope not in self.tier:
            raise Refused("a message is for another node or model")
        if message.whole("tier") != self.tier[scope]:
            raise Refused("a message is for another tier")
        part, number = self.context.scope(scope), message.whole("number", least=1)
        whose = {"node": self.address, "number": number}
        programs = {"call": (self._read_call, self._call), "measure": (self._read_measure, self._measure)}
        if message.kind not in programs:
            raise Refused(f"a message is of the kind {message.kind}")
        read, run = programs[message.kind]
        what, heard = read(part, message), message.whole("heard")  # a message that is refused changes nothing
        try:
            self.versions[scope].go_to(heard)
            answer = run(part, number, what)
        except Lost as error:
            text = "%s: %s; restore the folder of this node from a copy"
            log.error(text, self.address, error, extra=event("lost rows"))
            return Message("absent", {**whose, "why": "rows lost"})
        except Superseded:
            self.versions[scope].undo()
            return Message("absent", {**whose, "why": "superseded"})
        except Diverged as error:
            self.versions[scope].undo()
            about = [error.round, error.tier, error.nodes[:100], error.why]
            return Message("failed", {**whose, "text": str(error)[:1000], "diverged": about})
        except Exception as error:  # of the program: the run cannot go on
            self.versions[scope].undo()
            log.error("%s: %s", self.address, error, exc_info=error, extra=event("failed"))
            return Message("failed", {**whose, "text": f"{type(error).__name__}: {error}"[:1000]})
        return Message(answer.kind, {**answer.facts, **whose}, answer.tensors)

    def _read_call(self, part: Context, message: Message) -> tuple[Call, list[int]]:
        """The call that a message describes, and the calls above it."""
        method, chain = message.fact("method", str), message.fact("chain", list)
        if method not in self.allowed[part.name]:
            raise Refused(f"{method[:60]!r} is no program of {type(part.algorithm).__name__}")
        if not 1 <= len(chain) <= LONGEST_CHAIN or not all(type(n) is int for n in chain):
            raise Refused("a call does not say which calls it is part of")
        count = message.whole("receivers", least=1, most=1 << 16)
        clock, ids = Clock(message.whole("round"), message.whole("call")), torch.zeros(count, dtype=torch.int64)
        call = Call(self.tier[part.name], ids, method, clock, {}, torch.arange(count), scope=part.name)
        rows, _ = unpack_rows(
            message,
            lambda field: self.exchange.codec.plain,
            lambda forms: self.limits.check(form_key(call, DOWN), forms),
            count,
        )
        only = message.tensors.get("only")
        if only is not None and (only.dtype != torch.bool or only.shape != (len(part.topology.order),)):
            raise Refused("a call is for devices that are not below")
        return replace(call, rows=rows, only=only), chain

    def _call(self, part: Context, number: int, what: tuple[Call, list[int]]) -> Message:
        """Run a program of the method, and keep the rows that it leaves."""
        (call, chain), versions = what, self.versions[part.name]
        versions.begin(chain)
        if self.parent is not None:
            self.parent.chain = [*chain, number]
            self.parent.absences.clear()
        before, part.ledger = part.device_steps, Ledger(part.topology)
        part.ledger.start_round()
        answers: list[Rows] = []
        for k in range(len(call.ids)):
            alone = call.part(k, k + 1)
            answers.append(self.exchange.outgoing(self.context, alone, execute(self.context, alone, 0, 1)))
        versions.commit(number)
        codec = lambda field: self.exchange.codec_of(self.context, call, field)  # noqa: E731
        facts, tensors, _ = pack_rows(cat_rows(answers), len(answers), codec)
        steps, part.device_steps = part.device_steps - before, before
        absent = [] if self.parent is None else [list(line) for line in self.parent.absences]
        below = {"traffic": traffic_of(part), "absences": as_tensor(absent)}
        if self.parent is not None:
            below["present"] = as_tensor(self.parent.present())
            if self.parent.newcomers:
                below["newcomers"] = as_tensor(self.parent.newcomers)
        return Message("answer", {**facts, "steps": steps}, {**tensors, **below})

    def _read_measure(self, part: Context, message: Message) -> tuple[str, int, dict[str, Tensor]]:
        """The program of an evaluation, the round, and the rows sent down."""
        name, round_ = message.fact("program", str), message.whole("round")
        if name not in self.programs:
            raise Refused(f"{name[:60]!r} is no program of an evaluation")
        rows = {k.removeprefix("r:"): v for k, v in message.tensors.items() if k.startswith("r:")}
        if any(value.ndim < 2 or len(value) != 1 for value in rows.values()):
            raise Refused("an evaluation sends one row of each field")
        return name, round_, rows

    def _measure(self, part: Context, number: int, what: tuple[str, int, dict[str, Tensor]]) -> Message:
        """Run a program of an evaluation, here or at all devices below; nothing is kept."""
        name, round_, rows = what
        if self.parent is not None:
            model = self._own_model(part)
            if model is not None and name == "personal":
                self.keep_model(part.name, "team", model[0])
            elif model is not None:
                rows = {self._kind(part): model, **rows}
            which, fields = self.parent.measure(part, name, round_, rows)
        else:
            which, fields = torch.zeros(1, dtype=torch.int64), self._run_here(part, name, round_, rows)
        return Message("measured", {}, {"which": which, **{f"f:{k}": v for k, v in fields.items()}})

    def _run_here(self, part: Context, name: str, round_: int, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run a program of an evaluation at this device."""
        zero, leaf = torch.zeros(1, dtype=torch.int64), part.topology.leaf
        call = Call(leaf, zero, self.programs[name], Clock(round_), rows, zero, quiet=True, scope=part.name)
        fields = dict(as_dict(execute(self.context, call, 0, 1)))
        if name == "personal":
            if "" in fields:
                self.keep_model(part.name, "personal", fields[""][0])
            return {}
        return fields

    def _own_model(self, part: Context) -> Tensor | None:
        """[1, d] the model of this team that is evaluated; None if the method has none."""
        tier, own = self.tier[part.name], torch.zeros(1, dtype=torch.int64)
        initial = part.objective.initial.unsqueeze(0)
        known = f"{part.name}/{tier}" in self.limits.team_models or "model" in part.memory.names(tier)
        return part.memory.read(tier, "model", own, initial) if known else None

    def _kind(self, part: Context) -> str:
        """What the model of this team is called in an evaluation."""
        tier = self.tier[part.name]
        return "team" if tier == part.topology.leaf - 1 else part.topology.tier_names[tier]


def traffic_of(part: Context) -> Tensor:
    """[m, 4] tier, node, bytes down and up of all nodes below that took part in a call."""
    lines = [torch.zeros(0, 4, dtype=torch.int64)]
    for tier, mask in part.ledger.took_part.items():
        ids, link = mask.nonzero().squeeze(1), part.ledger.nodes[part.topology.link(tier)]
        lines.append(torch.stack([torch.full_like(ids, tier), ids, *(link[way][ids] for way in WAYS)], 1))
    return torch.cat(lines)
