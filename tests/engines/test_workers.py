"""Worker processes: answers in order, errors as they were raised, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import polytier
from polytier import FedAvg, Federation
from polytier.engines.stacked import AGAIN, Pieces, Times, cut
from polytier.engines.workers import Channel, WorkerLost, Workers, WorkerTraceback
from polytier.method.call import Call, Clock
from polytier.runs.loop import make_loop
from tasks import Forgetful, Locked, after, compute, die, echo, fail, fail_by, meet, remember, samples_of, touch

NUMBER = 3  # processes, with this one


# -- in this process ----------------------------------------------------------------------------------


def federation() -> Federation:
    rng = np.random.default_rng(3)
    return Federation.from_arrays(rng.normal(size=(12, 2)), rng.integers(0, 3, 12), np.repeat([0, 1, 2], 4))


def new_workers(number: int = NUMBER) -> Workers:
    with make_loop(FedAvg(), federation(), "mclr", batching="eager") as training:
        return Workers(training.context, number, compute)


@pytest.fixture(scope="module")
def kept() -> Iterator[list[Workers]]:
    found: list[Workers] = []
    yield found
    for workers in found:
        workers.close()


@pytest.fixture
def workers(kept) -> Workers:
    """Those of the test before, as starting processes takes seconds; others if they were closed."""
    if not kept or not kept[-1].folder.exists():
        kept.append(new_workers())
    return kept[-1]


def ask(workers: Workers, function: Any, *given: Any) -> Any:
    """The answer of another process: this one has the first call."""
    _, answer = workers.run([(echo, None), (function, *given)])
    return answer


def assert_usable(workers: Workers) -> None:
    assert list(workers.run((echo, k) for k in range(5))) == list(range(5))


def processes_of(workers: Workers) -> list[Any]:
    return [channel.process for channel in workers._channels]


# -- answers ------------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_calls(workers, tmp_path):
    """The second call waits for the sixth."""
    there = tmp_path / "there"
    calls = [(echo, 0), (after, there, 1), (echo, 2), (echo, 3), (echo, 4), (touch, there, 5)]
    calls += [(echo, k) for k in range(6, 20)]
    assert list(workers.run(calls)) == list(range(20))


def test_work_is_done_by_all_at_the_same_time(workers, tmp_path):
    paths = [tmp_path / name for name in ("one", "two", "three")]
    ids = list(workers.run((meet, paths[k], paths[k - 1]) for k in range(NUMBER)))
    assert ids[0] == os.getpid()
    assert sorted(ids[1:]) == sorted(p.pid for p in processes_of(workers))


def test_a_process_has_its_next_call_before_it_asks(workers, tmp_path):
    """The first call, which is computed here, ends when the fourth one has: that one waits at another process."""
    there = tmp_path / "there"
    calls = [(after, there, 0), (echo, 1), (echo, 2), (touch, there, 3), *((echo, k) for k in range(4, 9))]
    assert list(workers.run(calls)) == list(range(9))


def test_no_calls_no_answers(workers):
    assert list(workers.run([])) == []


def test_calls_are_made_as_they_are_needed(workers):
    """What waits to be asked for is held in memory."""
    made = []
    answers = workers.run((echo, made.append(k) or k) for k in range(100))
    assert next(answers) == 0
    assert len(made) <= 2 * NUMBER + 2
    assert list(answers) == list(range(1, 100))


def test_data_and_memory_are_shared(workers):
    expected = federation()
    answers = workers.run((samples_of, k) for k in range(3))
    for k, (x, y) in enumerate(answers):
        assert torch.equal(x, expected.device(k)[0])
        assert torch.equal(y, expected.device(k)[1])
    list(workers.run((remember, k) for k in (0, 2)))
    rows = workers.context.memory.read(1, "model", torch.arange(3), torch.full((3, 3), -1.0))
    assert rows.tolist() == [[0.0] * 3, [-1.0] * 3, [2.0] * 3]


# -- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("a bad value", 3), KeyError("no such key"), RuntimeError("a fault")])
def test_an_error_arrives_as_itself(workers, error):
    with pytest.raises(type(error)) as caught:
        list(workers.run([(echo, 0), (fail, error), *[(echo, 1)] * 5]))
    assert type(caught.value) is type(error)
    assert caught.value.args == error.args
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerTraceback)
    assert "in fail" in str(cause)  # where in the worker
    assert "raise error" in str(cause)
    before = processes_of(workers)
    assert_usable(workers)
    assert processes_of(workers) == before


def test_an_error_here_is_raised_when_the_others_have_answered(workers, tmp_path):
    with pytest.raises(ValueError, match="here") as caught:
        list(workers.run([(fail, ValueError("here")), (touch, tmp_path / "there", 1)]))
    assert caught.value.__cause__ is None
    assert (tmp_path / "there").exists()
    assert_usable(workers)


@pytest.mark.parametrize(("kind", "given"), [(Locked, ("in use",)), (Forgetful, ("in use", 3))])
def test_an_error_that_cannot_be_sent_is_told(workers, kind, given):
    with pytest.raises(RuntimeError, match=f"{kind.__name__}: in use") as caught:
        ask(workers, fail_by, kind, *given)
    assert "in fail_by" in str(caught.value.__cause__)
    assert_usable(workers)


def test_whoever_stops_in_the_middle_leaves_no_answers_behind(workers):
    answers = workers.run((echo, k) for k in range(100, 200))
    assert [next(answers) for _ in range(3)] == [100, 101, 102]
    answers.close()  # type: ignore[attr-defined]
    assert_usable(workers)


# -- messages -----------------------------------------------------------------------------------------


def tensors(size: int) -> list[torch.Tensor]:
    """Of many kinds; `size` makes them larger."""
    generator = torch.Generator().manual_seed(size)
    plain = torch.randn(size, 3, generator=generator)
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-310], dtype=torch.float64)
    kinds = [plain, plain.double(), plain.half(), plain > 0, (9 * plain).to(torch.int8), (9 * plain).long(), odd]
    return [*kinds, plain.T, plain[:, 1], plain[::2], plain[:1].expand(4, 3), plain[0, 0], plain[:0], plain[:, :0]]


def assert_same_tensors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()


def test_tensors_arrive_to_the_bit_as_messages_grow(workers):
    for size in (1, 50, 2, 5000, 3, 0, 20_000):
        sent = tensors(max(size, 1)) if size else [torch.zeros(0)]
        for found in workers.run([(echo, sent)] * (2 * NUMBER)):
            assert_same_tensors(found, sent)


@pytest.fixture
def ends(tmp_path) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel."""
    here, there = multiprocessing.Pipe()
    yield Channel(here, tmp_path / "to", tmp_path / "from"), Channel(there, tmp_path / "from", tmp_path / "to")
    here.close()
    there.close()


def test_a_message_may_be_anything_with_tensors_in_it(ends):
    here, there = ends
    for size in (1, 100, 7):
        message = {"rows": tensors(size), "words": ("a", None, 3.5), "array": np.arange(size)}
        here.send(message)
        found = there.receive()
        assert_same_tensors(found["rows"], message["rows"])
        assert found["words"] == message["words"]
        assert (found["array"] == message["array"]).all()
        there.send(found["rows"])
        assert_same_tensors(here.receive(), message["rows"])


def test_what_arrived_stays_when_the_next_message_comes(ends):
    here, there = ends
    here.send(torch.arange(4))
    first = there.receive()
    here.send(torch.arange(4) + 10)
    second = there.receive()
    second += 100  # and it may be changed
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [110, 111, 112, 113]


def test_a_first_message_may_be_of_empty_tensors_alone(ends):
    here, there = ends
    here.send([torch.zeros(0), torch.zeros(2, 0, dtype=torch.int64)])
    assert_same_tensors(there.receive(), [torch.zeros(0), torch.zeros(2, 0, dtype=torch.int64)])


# -- by threads of this process, which start at once --------------------------------------------------


class Worker(threading.Thread):
    """Takes the place of a process; None ends it."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(daemon=True)
        self.channel = channel
        self.start()

    def run(self) -> None:
        with suppress(WorkerLost):  # the other side may be gone, also when an answer is ready
            while call := self.channel.receive():
                try:
                    answer = compute(None, call), None, ""  # type: ignore[arg-type]
                except Exception as error:
                    answer = None, error, "where it was raised"
                self.channel.send(answer)
        self.channel.pipe.close()

    def kill(self) -> None:
        """It ends by itself when the pipe does."""


@pytest.fixture
def threads() -> Iterator[Workers]:
    workers = new_workers()
    for k in range(1, NUMBER):
        ours, theirs = multiprocessing.Pipe()
        files = workers.folder / f"to-{k}", workers.folder / f"from-{k}"
        workers._channels.append(Channel(ours, *files, Worker(Channel(theirs, *files[::-1]))))
    yield workers
    workers.close()


def test_threads_do_as_well(threads):
    with pytest.raises(ValueError, match="here") as caught:
        ask(threads, fail, ValueError("here"))
    assert "where it was raised" in str(caught.value.__cause__)
    assert_usable(threads)


def test_a_worker_that_ended_while_it_had_nothing_to_do(threads):
    before = processes_of(threads)
    threads._channels[0].send(None)
    before[0].join()
    with pytest.raises(WorkerLost):
        assert_usable(threads)
    assert not any(thread.is_alive() for thread in before)
    assert processes_of(threads) == []


def test_calls_that_cannot_be_made(threads):
    def calls() -> Iterator[Any]:
        yield (echo, "first")
        yield (echo, "second")
        raise ValueError("no third call")

    with pytest.raises(ValueError, match="no third call"):
        list(threads.run(calls()))
    assert_usable(threads)


@pytest.mark.parametrize("kind", [FileNotFoundError, EOFError])
def test_a_fault_of_files_is_no_lost_worker(threads, kind):
    with pytest.raises(kind, match="samples"):
        ask(threads, fail_by, kind, "samples")
    assert_usable(threads)


# -- the end ------------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced(workers, tmp_path):
    assert_usable(workers)
    before = processes_of(workers)
    with pytest.raises(WorkerLost, match="ended in the middle of a round"):
        list(workers.run([(echo, 0), (after, tmp_path / "never", 0), (die,)]))  # the other one is at work
    assert not any(process.is_alive() for process in before)
    assert_usable(workers)
    fresh = processes_of(workers)
    assert len(fresh) == NUMBER - 1
    assert all(process.is_alive() for process in fresh)
    assert not {p.pid for p in before} & {p.pid for p in fresh}


def test_close_leaves_nothing(workers):
    assert_usable(workers)
    processes, folder = processes_of(workers), workers.folder
    assert any(folder.iterdir())
    workers.close()
    assert [process.exitcode for process in processes] == [0] * (NUMBER - 1)  # they went by themselves
    assert not folder.exists()
    workers.close()  # once more does no harm


def test_free_memory_is_released_every_ten_seconds(monkeypatch):
    from polytier.engines import process_settings

    asked, now = [], [100.0]
    monkeypatch.setattr(process_settings.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=asked.append))
    monkeypatch.setattr(process_settings.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(process_settings, "_released", 100.0)
    for second in (105.0, 111.0, 115.0, 122.0):
        now[0] = second
        process_settings.release_memory()
    assert asked == [0, 0]  # at 111 and 122


def test_results_need_not_be_copied(workers):
    expected = [torch.arange(1000.0) * k for k in range(NUMBER)]
    for _ in range(3):
        found = list(workers.run(((echo, tensor) for tensor in expected), copied=False))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(tensor.data_ptr() % 64 == 0 for tensor in found[1:])


def test_short_calls_are_computed_where_that_is_faster():
    times = Times()
    for seconds in (2.0, 0.03, 0.02, 0.03):
        assert not times.alone_is_faster()
        times.note(times.shared, seconds)
    for seconds in (1.0, 0.01, 0.02, 0.01):
        assert times.alone_is_faster()  # it is tried
        times.note(times.alone, seconds)
    assert times.alone_is_faster()  # and was faster
    assert not Times([2.0, 0.02, 0.02, 0.02], [1.0, 0.03, 0.03, 0.03]).alone_is_faster()
    assert not Times([2.0, 0.2, 0.2, 0.2]).alone_is_faster()  # too long to be tried
    settled = Times([2.0, 0.02, 0.02, 0.02], [1.0, 0.01, 0.01, 0.01])
    assert [settled.alone_is_faster() for _ in range(AGAIN)] == [True] * (AGAIN - 1) + [False]  # measured again


@pytest.mark.parametrize("alone", [False, True])
def test_who_computes_a_call_changes_no_bit(monkeypatch, alone):
    digits = polytier.build_federation("digits", devices=12, teams=2)
    method = polytier.PerMFL(device_steps=2, team_rounds=2)
    expected = polytier.train(method, digits, "mclr", rounds=3, workers=1)
    monkeypatch.setattr(Times, "alone_is_faster", lambda self: alone)
    found = polytier.train(method, digits, "mclr", rounds=3, workers=2)
    for model in ("personal", "global_"):
        assert torch.equal(getattr(found, model), getattr(expected, model))


def test_a_kept_cut_gives_the_parts_of_the_call_at_hand():
    blocks, sender = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    first = Call(1, torch.arange(8), "solve", Clock(0), torch.zeros(2, 3), sender, blocks, torch.ones(8))
    pieces = Pieces(first, 4, cut(first, 4))
    later = replace(first, clock=Clock(5, 1), rows=torch.arange(6.0).reshape(2, 3), quiet=True)
    assert pieces.fits(later)
    assert not pieces.fits(replace(first, ids=first.ids.clone()))
    for found, (start, end, _) in zip(pieces.parts(later), pieces.runs, strict=True):
        expected = later.part(start, end)
        assert (found.clock, found.quiet) == (later.clock, True)
        for name in ("ids", "rows", "sender", "blocks", "shares"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
