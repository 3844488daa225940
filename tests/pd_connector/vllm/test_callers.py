"""Who is found further up the stack."""

from pd_connector.vllm.callers import callers


class Caller:
    def __init__(self, inner: "Caller | None" = None) -> None:
        self.inner = inner

    def call(self) -> list[object]:
        return list(callers()) if self.inner is None else self.inner.call()


def test_callers_are_found_from_the_innermost_on() -> None:
    inner = Caller()
    outer = Caller(inner)
    assert outer.call()[:2] == [inner, outer]


def test_who_calls_nobody_is_not_found() -> None:
    idle = Caller()
    assert idle not in Caller().call()
