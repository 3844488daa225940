"""Whether the system has threads left: C libraries that get none end the process."""

import threading


def check_threads(number: int) -> None:
    """Start so many threads, which end at once: no process can read the limit of the pod that its container is in.

    Takes less than a millisecond.

    Raises:
        RuntimeError: the system has fewer left.
    """
    end, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(number):
            thread = threading.Thread(target=end.wait, name="pd-trial", daemon=True)
            thread.start()
            started.append(thread)
    finally:
        end.set()
        for thread in started:
            thread.join()
