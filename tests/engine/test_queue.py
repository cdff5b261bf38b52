from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.queue import WaitingQueue
from astrai_triton.engine.result import TaskHandle
from astrai_triton.engine.stops import StopMatcher
from astrai_triton.engine.task import Task
from fakes import ByteDetokenizer

NOBODY: dict[str | None, int] = {}


def make_task(arrival: int, key: str | None = None) -> Task:
    params = SamplingParams()
    return Task(
        handle=TaskHandle(f"task-{arrival}", 1, params, lambda: None),
        params=params,
        prompt_len=1,
        max_tokens=1,
        tokens=[0],
        seed=0,
        stop_ids=frozenset(),
        text_decoder=ByteDetokenizer(),
        stops=StopMatcher(()),
        arrival=arrival,
        key=key,
    )


def make_followers(leader: Task, arrivals: Iterable[int]) -> list[Task]:
    followers = [make_task(arrival, leader.key) for arrival in arrivals]
    for task in followers:
        task.leader = leader
    return followers


def fill(queue: WaitingQueue, keys: str) -> list[Task]:
    """One task per letter; ``.`` has no key."""
    tasks = [make_task(i, None if key == "." else key) for i, key in enumerate(keys)]
    for task in tasks:
        queue.push(task, NOBODY)
    return tasks


def start_all(queue: WaitingQueue, cost: int = 10) -> str:
    """Start everything, each for ``cost`` tokens; the keys in the order of their starts."""
    order = ""
    while len(queue):
        task = next(queue.candidates(NOBODY))
        queue.take(task)
        queue.charge(task.key, cost)
        order += task.key or "."
    return order


def test_one_key_is_served_in_the_order_of_arrival() -> None:
    queue = WaitingQueue()
    tasks = fill(queue, "....")
    assert list(queue.candidates(NOBODY)) == tasks


def test_keys_take_turns_whatever_their_backlog() -> None:
    queue = WaitingQueue()
    fill(queue, "aaaaaabbc")
    assert start_all(queue) == "abcabaaaa"


def test_the_meter_counts_tokens_not_requests() -> None:
    queue = WaitingQueue()
    a, *_ = fill(queue, "aaab")
    queue.take(a)
    queue.charge("a", 1000)
    assert next(queue.candidates(NOBODY)).key == "b"
    queue.charge("b", 5000)
    assert next(queue.candidates(NOBODY)).key == "a"


def test_tokens_of_running_tasks_count_before_they_are_on_the_meter() -> None:
    queue = WaitingQueue()
    fill(queue, "ab")
    assert next(queue.candidates({"a": 1})).key == "b"
    assert next(queue.candidates({"b": 1})).key == "a"


def test_a_key_that_was_idle_has_saved_nothing_up() -> None:
    queue = WaitingQueue()
    fill(queue, "aa")
    queue.charge("a", 100)
    late = [make_task(2 + i, "b") for i in range(3)]
    for task in late:
        queue.push(task, NOBODY)
    order = ""
    for _ in range(4):
        task = next(queue.candidates(NOBODY))
        queue.take(task)
        queue.charge(task.key, 10)
        order += str(task.key)
    assert order == "abab"


def test_a_key_that_comes_back_keeps_its_high_reading() -> None:
    queue = WaitingQueue()
    fill(queue, "ab")
    queue.charge("a", 100)
    queue.take(next(task for task in queue if task.key == "a"))
    queue.push(make_task(9, "a"), NOBODY)
    assert next(queue.candidates(NOBODY)).key == "b"


def test_preempted_tasks_come_first_in_the_order_of_their_arrival() -> None:
    queue = WaitingQueue()
    tasks = fill(queue, "abab")
    for task in tasks[:2]:
        queue.take(task)
    for task in reversed(tasks[:2]):
        queue.restore(task)
    assert list(queue.candidates({"a": 999}))[:2] == tasks[:2]


def test_the_longest_waiting_is_offered_alone_once_it_was_overtaken_often_enough() -> None:
    queue = WaitingQueue(max_overtaken=2)
    old, *_ = fill(queue, "abbb")
    for _ in range(2):
        task = next(task for task in queue.candidates(NOBODY) if task is not old)
        queue.take(task)
    assert list(queue.candidates({"a": 10**9})) == [old]


def test_a_restored_older_task_does_not_reset_the_count_of_a_younger_one() -> None:
    queue = WaitingQueue(max_overtaken=2)
    tasks = fill(queue, "abbb")
    queue.take(tasks[0])
    queue.take(tasks[2])
    assert tasks[1].num_overtaken == 1
    queue.restore(tasks[0])
    queue.take(tasks[0])
    assert tasks[1].num_overtaken == 1


def test_a_held_task_is_not_offered_until_its_leader_has_computed_or_ended() -> None:
    queue = WaitingQueue(max_overtaken=0)
    (leader,) = fill(queue, "a")
    followers = make_followers(leader, (1, 2))
    for task in followers:
        queue.push(task, NOBODY)
    assert list(queue.candidates(NOBODY)) == [leader]
    assert len(queue) == 3
    queue.take(leader)
    assert not queue.release()
    assert not list(queue.candidates(NOBODY))
    leader.tokens.append(97)
    assert queue.release() == followers
    assert list(queue.candidates(NOBODY)) == followers[:1]
    assert not queue.release()


def test_a_released_task_takes_the_place_of_its_arrival() -> None:
    queue = WaitingQueue()
    (leader,) = fill(queue, "a")
    followers = make_followers(leader, (1, 2))
    later = [make_task(3, "a"), make_task(4, "b")]
    for task in (*followers, *later):
        queue.push(task, NOBODY)
    queue.take(leader)
    leader.is_done = True
    queue.release()
    assert [task.arrival for task in queue.candidates({"a": 1})] == [4, 1, 2, 3]


def test_a_held_task_neither_counts_starts_nor_keeps_another_from_counting() -> None:
    queue = WaitingQueue(max_overtaken=2)
    (leader,) = fill(queue, "a")
    (follower,) = make_followers(leader, (1,))
    old, *young = [make_task(arrival, "b") for arrival in range(2, 6)]
    for task in (follower, old, *young):
        queue.push(task, NOBODY)
    queue.take(leader)
    for task in young[:2]:
        queue.take(task)
    assert (follower.num_overtaken, old.num_overtaken) == (0, 2)
    assert list(queue.candidates(NOBODY)) == [old]


def test_a_key_keeps_its_credit_while_its_tasks_are_held() -> None:
    queue = WaitingQueue()
    (leader,) = fill(queue, "a")
    queue.push(make_task(1, "b"), NOBODY)
    queue.charge("b", 100)
    (follower,) = make_followers(leader, (2,))
    queue.push(follower, NOBODY)
    queue.take(leader)
    leader.is_done = True
    queue.release()
    queue.charge("a", 99)
    assert next(queue.candidates(NOBODY)) is follower


@given(st.data())
def test_no_task_waits_for_more_starts_than_the_bound(data: st.DataObject) -> None:
    bound = data.draw(st.integers(0, 5), label="max_overtaken")
    queue = WaitingQueue(max_overtaken=bound)
    waited: dict[int, tuple[int, int]] = {}
    started: list[Task] = []
    num_starts = 0
    arrivals = iter(range(10_000))
    for _ in range(40):
        for key in data.draw(st.lists(st.sampled_from("abcd"), max_size=2)):
            task = make_task(next(arrivals), key)
            waited[task.arrival] = (num_starts, len(queue))
            queue.push(task, NOBODY)
            for follower in make_followers(task, islice(arrivals, data.draw(st.integers(0, 1)))):
                queue.push(follower, NOBODY)
        if started and data.draw(st.booleans()):
            started.pop(data.draw(st.integers(0, len(started) - 1))).is_done = True
        for task in queue.release():
            waited[task.arrival] = (num_starts, sum(other.arrival < task.arrival for other in queue))
        offered = list(queue.candidates(NOBODY))
        if not offered:
            continue
        # The worst admission there is: the pages fit any of those on offer but the first.
        task = data.draw(st.sampled_from(offered[1:] or offered))
        queue.take(task)
        queue.charge(task.key, data.draw(st.integers(0, 1000)))
        num_starts += 1
        started.append(task)
        for arrival, (start, older) in waited.items():
            assert num_starts - start <= (older + 1) * (bound + 1), f"task {arrival} starves"
        del waited[task.arrival]


@given(st.lists(st.tuples(st.sampled_from("pftrd"), st.integers(0, 9), st.sampled_from("abc")), max_size=60))
def test_the_queue_holds_exactly_what_was_pushed_and_not_taken(steps: list[tuple[str, int, str]]) -> None:
    queue = WaitingQueue()
    held: set[Task] = set()
    running: deque[Task] = deque()
    arrivals = iter(range(1000))
    for kind, at, key in steps:
        if kind == "p":
            task = make_task(next(arrivals), key)
            queue.push(task, NOBODY)
            held.add(task)
        elif kind == "f" and (held or running):
            leaders = sorted((*held, *running), key=lambda task: task.arrival)
            (task,) = make_followers(leaders[at % len(leaders)], (next(arrivals),))
            queue.push(task, NOBODY)
            held.add(task)
        elif kind == "t":
            assert all(task in held for task in queue.release())
            task = next(queue.candidates(NOBODY), None)
            assert (task is None) == all(other.is_held for other in held)
            if task is not None:
                queue.take(task)
                held.remove(task)
                running.append(task)
        elif kind == "r" and running:
            task = running.pop()
            queue.restore(task)
            held.add(task)
        elif kind == "d" and held:
            task = sorted(held, key=lambda task: task.arrival)[at % len(held)]
            task.is_done = True
            assert queue.remove_done() == [task]
            held.remove(task)
        assert set(queue) == held
        assert len(queue) == len(held)
    assert set(queue.clear()) == held
    assert not len(queue)
