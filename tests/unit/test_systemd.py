"""What systemd is told, over a real datagram socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.lifecycle import JobState, Policy
from supervisor.lifecycle.state import Phase
from supervisor.systemd import ServiceManager


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Systemd:
    """The manager's end of $NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.settimeout(0.05)

    def heard(self) -> list[str]:
        """Every datagram since the last call."""
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode())
            except TimeoutError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


@pytest.fixture
def systemd(path: str) -> Iterator[Systemd]:
    manager = Systemd(path)
    yield manager
    manager.close()


def a_state(phase: Phase, generation: int = 3) -> JobState:
    return replace(JobState(policy=Policy()), phase=phase, generation=generation)


def service(path: str, clock: FakeClock, **environ: str) -> ServiceManager:
    return ServiceManager({"NOTIFY_SOCKET": path, **environ}, clock)


def test_outside_a_unit_nothing_is_sent(clock: FakeClock) -> None:
    manager = ServiceManager({}, clock)

    manager.ready()
    manager.turned(a_state(Phase.TRAINING))


def test_a_manager_that_is_gone_is_no_error(path: str, clock: FakeClock) -> None:
    service(path, clock).ready()


def test_ready_is_told(systemd: Systemd, path: str, clock: FakeClock) -> None:
    service(path, clock).ready()

    assert systemd.heard() == ["READY=1"]


def test_an_abstract_socket_is_reached(clock: FakeClock) -> None:
    systemd = Systemd("\0lastgasp-test-notify")
    try:
        service("@lastgasp-test-notify", clock).ready()

        assert systemd.heard() == ["READY=1"]
    finally:
        systemd.close()


def test_the_phase_is_shown(systemd: Systemd, path: str, clock: FakeClock) -> None:
    service(path, clock).turned(a_state(Phase.TRAINING))

    assert systemd.heard() == ["STATUS=training, generation 3"]


def test_the_watchdog_is_fed_at_least_twice_in_its_time(
    systemd: Systemd, path: str, clock: FakeClock
) -> None:
    manager = service(path, clock, WATCHDOG_USEC="4000000")

    for _ in range(40):  # ten seconds of turns
        manager.turned(a_state(Phase.TRAINING))
        clock.sleep(0.25)

    pings = [text for text in systemd.heard() if "WATCHDOG=1" in text]
    assert 5 <= len(pings) <= 6


def test_without_a_watchdog_no_ping_is_sent(systemd: Systemd, path: str, clock: FakeClock) -> None:
    service(path, clock).turned(a_state(Phase.TRAINING))

    assert "WATCHDOG" not in systemd.heard()[0]


def test_turns_without_news_are_not_told(systemd: Systemd, path: str, clock: FakeClock) -> None:
    manager = service(path, clock)
    for _ in range(100):
        manager.turned(a_state(Phase.TRAINING))

    assert len(systemd.heard()) == 1


def test_a_new_phase_is_told_at_once(systemd: Systemd, path: str, clock: FakeClock) -> None:
    manager = service(path, clock)
    manager.turned(a_state(Phase.TRAINING))
    manager.turned(a_state(Phase.SAVING))

    assert [text.split(",")[0] for text in systemd.heard()] == ["STATUS=training", "STATUS=saving"]


@pytest.mark.parametrize("phase", [Phase.EVACUATING, Phase.UPLOADING, Phase.STOPPING])
def test_more_time_is_asked_for_again_and_again_while_a_save_goes_on(
    systemd: Systemd, path: str, clock: FakeClock, phase: Phase
) -> None:
    """systemd forgets an extension unless it is repeated within the time it gave."""
    manager = service(path, clock)

    for _ in range(4):
        manager.turned(a_state(phase))
        clock.sleep(6.0)

    told = systemd.heard()
    assert len(told) == 4
    assert all("EXTEND_TIMEOUT_USEC=30000000" in text for text in told)


def test_a_drill_never_says_that_the_service_stops(
    systemd: Systemd, path: str, clock: FakeClock
) -> None:
    """After STOPPING=1 systemd would end the unit that has just been relaunched."""
    manager = service(path, clock)
    for phase in (
        Phase.TRAINING,
        Phase.EVACUATING,
        Phase.UPLOADING,
        Phase.STOPPING,
        Phase.RELAUNCHING,
        Phase.STARTING,
        Phase.TRAINING,
    ):
        manager.turned(a_state(phase))

    assert "STOPPING=1" not in "\n".join(systemd.heard())


@pytest.mark.parametrize(
    "phase", [Phase.EVACUATED, Phase.FINISHED, Phase.FAILED, Phase.FENCED], ids=lambda p: p.value
)
def test_the_end_is_told_once(systemd: Systemd, path: str, clock: FakeClock, phase: Phase) -> None:
    manager = service(path, clock)
    manager.turned(a_state(Phase.UPLOADING))
    for _ in range(3):
        manager.turned(a_state(phase))
        clock.sleep(6.0)

    assert "\n".join(systemd.heard()).count("STOPPING=1") == 1
