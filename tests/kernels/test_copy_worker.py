"""The CPU's copy engine: beside the caller's thread, after what it must, and failing where somebody waits."""

import gc
import subprocess
import sys
import threading

import pytest

from oasis_tp.kv.copy_worker import CopyWorker


def test_a_copy_runs_beside_the_caller() -> None:
    worker, may_go, ran_on = CopyWorker(), threading.Event(), []

    def copy() -> None:
        assert may_go.wait(30)
        ran_on.append(threading.current_thread())

    begun = threading.Event()
    end = worker.submit(lambda: (begun.set(), copy())[1], [])
    assert begun.wait(30) and not end.reached()
    may_go.set()
    end.wait()
    assert end.reached() and ran_on != [threading.current_thread()]


def test_who_waits_for_a_copy_that_has_not_begun_does_it_and_what_comes_before_it() -> None:
    worker, may_go, order = CopyWorker(), threading.Event(), []
    begun = threading.Event()
    blocking = worker.submit(lambda: (begun.set(), may_go.wait(30))[1], [])
    assert begun.wait(30)
    first = worker.submit(lambda: order.append(("first", threading.current_thread())), [])
    second = worker.submit(lambda: order.append(("second", threading.current_thread())), [first])
    second.wait()
    assert order == [("first", threading.current_thread()), ("second", threading.current_thread())]
    may_go.set()
    blocking.wait()
    last = worker.submit(lambda: order.append(("last", threading.current_thread())), [second])
    last.wait()
    assert [name for name, _ in order] == ["first", "second", "last"], "a copy was done twice"


def test_a_failure_is_raised_by_who_asks() -> None:
    def fail() -> None:
        raise OSError("no such page")

    end = CopyWorker().submit(fail, [])
    for ask in (end.wait, end.reached):
        with pytest.raises(RuntimeError, match="a background copy failed") as raised:
            ask()
        assert isinstance(raised.value.__cause__, OSError)


def test_the_thread_ends_with_its_worker() -> None:
    worker = CopyWorker()
    threads: list[threading.Thread] = []
    done = threading.Event()
    worker.submit(lambda: (threads.append(threading.current_thread()), done.set())[1], [])
    assert done.wait(30)
    del worker
    gc.collect()
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_a_process_may_end_while_copies_are_under_way() -> None:
    code = (
        "import torch; from oasis_tp.kv.copy_worker import CopyWorker\n"
        "worker, block = CopyWorker(), torch.zeros(2**24)\n"
        "for _ in range(30): worker.submit(lambda: block.clone(), [])"
    )
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
