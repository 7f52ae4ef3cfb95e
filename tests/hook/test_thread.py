import threading

from guard.hook.thread import Worker


def test_worker_starts_once_per_process_and_again_in_a_child():
    entered: list[str] = []

    def target(stop: threading.Event) -> None:
        entered.append(threading.current_thread().name)
        stop.wait(10)

    worker = Worker("kvguard-test", target)
    assert worker.start(100)
    assert not worker.start(100)
    first = worker._thread
    assert first is not None
    worker.signal()
    first.join(5)
    assert worker.start(101)
    worker.signal()
    worker.join(101, 5)
    assert entered == ["kvguard-test"] * 2
