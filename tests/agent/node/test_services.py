import asyncio
import time

from mp_agent.node.agent import Services


class Clock:
    """A service that notes what it is given."""

    def __init__(self, *, broken: bool = False, stop_seconds: float = 0.0) -> None:
        self.calls: list[str] = []
        self._broken = broken
        self._stop_seconds = stop_seconds

    def start(self) -> None:
        self._note("start")

    def tick(self, now_seconds: float) -> None:
        self._note("tick")

    async def stop(self, deadline_seconds: float) -> None:
        await asyncio.sleep(self._stop_seconds)
        self._note("stop")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self._broken:
            raise RuntimeError(f"{call} of a broken service")


def live(services: Services, *, limit_seconds: float = 1.0) -> float:
    async def main() -> float:
        services.start()
        services.tick(1.0)
        services.tick(2.0)
        began = time.monotonic()
        await services.stop(began + limit_seconds)
        return time.monotonic() - began

    return asyncio.run(main())


def test_a_service_that_fails_hurts_no_other_and_is_logged_once_per_call(caplog):
    broken, sound = Clock(broken=True), Clock()
    live(Services([broken, sound]))
    assert sound.calls == ["start", "tick", "tick", "stop"]
    assert broken.calls == ["start", "tick", "tick", "stop"]
    assert caplog.text.count("tick failed") == 1


def test_one_that_does_not_end_is_cut_off_and_the_others_end(caplog):
    slow, sound = Clock(stop_seconds=60.0), Clock()
    assert live(Services([slow, sound]), limit_seconds=0.1) < 5.0
    assert sound.calls[-1] == "stop"
    assert "Clock failed to stop" in caplog.text
