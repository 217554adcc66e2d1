"""EC2: spot interruption notices and rebalance recommendations, by IMDSv2.

Source: EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance
recommendations", "Use the Instance Metadata Service": PUT /latest/api/token with a TTL header, 404
means that there is nothing, 401 that the token has expired.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Final

import urllib3

from supervisor.clock import Clock
from supervisor.lifecycle.inputs import Notice, NoticeKind
from supervisor.notices.base import SourceFailed

TOKEN_TTL_S: Final = 3600
RENEW_BEFORE_S: Final = 60.0
REBALANCE_EVERY_S: Final = 15.0
HIBERNATE_LEAD_S: Final = 5.0
MAX_BODY_BYTES: Final = 65536
DEFAULT_TIMEOUT: Final = urllib3.Timeout(connect=1.0, read=2.0)
HOP_LIMIT_HINT: Final = (
    "requests without a token are answered and the token request is not: that is the hop limit. "
    "Raise the instance's HttpPutResponseHopLimit to 2 or use the host's network"
)
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN_HEADER = "X-aws-ec2-metadata-token"
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class Ec2Source:
    """The metadata service of this instance."""

    name = "ec2"

    def __init__(
        self,
        *,
        endpoint: str,
        clock: Clock,
        poll_s: float,
        timeout: urllib3.Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        self.poll_s = poll_s
        self._endpoint = endpoint.rstrip("/")
        self._clock = clock
        self._pool = urllib3.PoolManager(retries=False, timeout=timeout, maxsize=1)
        self._token = ""
        self._renew_at = 0.0
        self._rebalance: Notice | None = None
        self._rebalance_at = float("-inf")

    def look(self) -> tuple[Notice, ...]:
        """The interruption, if one is announced, and the rebalance advice.

        Raises:
            SourceFailed: unreachable, throttled, or a body that is not what the manual says.
        """
        found = []
        body = self._get(_ACTION)
        if body is not None:
            found.append(self._interruption(body))
        # With an interruption at hand nothing else may fail and keep it from being told.
        elif self._clock.monotonic() - self._rebalance_at >= REBALANCE_EVERY_S:
            self._rebalance_at = self._clock.monotonic()
            self._rebalance = self._advice()
        if self._rebalance is not None:
            found.append(self._rebalance)
        return tuple(found)

    def _interruption(self, body: bytes) -> Notice:
        try:
            document = json.loads(body)
            action, time = document["action"], document["time"]
            at = datetime.strptime(time, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SourceFailed(
                f"EC2 answered {body[:200]!r} for {_ACTION}, which is not an instance action"
            ) from error
        lead_s = at.timestamp() - self._clock.wall()
        if action == "hibernate":
            # Hibernation begins at once, whatever the time says. Source: same page, "hibernate".
            lead_s = min(lead_s, HIBERNATE_LEAD_S)
        return Notice(
            source=self.name,
            kind=NoticeKind.RECLAIM,
            deadline_at=self._clock.monotonic() + max(0.0, lead_s),
            reason=f"spot {action} at {time}",
        )

    def _advice(self) -> Notice | None:
        body = self._get(_REBALANCE)
        if body is None:
            return None
        return Notice(
            source="ec2-rebalance",
            kind=NoticeKind.ADVICE,
            deadline_at=self._clock.monotonic() + 120.0,
            reason="rebalance recommendation",
        )

    def _get(self, path: str) -> bytes | None:
        """The body, or None for 404. A refused token is renewed once."""
        for is_second_try in (False, True):
            response = self._request("GET", path, {_TOKEN_HEADER: self._valid_token()})
            if response.status == 404:
                return None
            if response.status == 200:
                return bytes(response.data[:MAX_BODY_BYTES])
            self._token = ""
            if response.status != 401 or is_second_try:
                raise self._refused(response, path)
        raise AssertionError("unreachable")

    def _valid_token(self) -> str:
        now = self._clock.monotonic()
        if not self._token or now >= self._renew_at:
            response = self._request("PUT", "/latest/api/token", {_TTL_HEADER: str(TOKEN_TTL_S)})
            if response.status != 200:
                raise self._refused(response, "/latest/api/token")
            self._token = response.data[:4096].decode("ascii", errors="replace").strip()
            ttl_s = _whole(response.headers.get(_TTL_HEADER), TOKEN_TTL_S)
            self._renew_at = now + max(0.0, ttl_s - min(RENEW_BEFORE_S, ttl_s / 2))
        return self._token

    def _request(self, method: str, path: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        try:
            return self._pool.request(method, self._endpoint + path, headers=headers)
        except urllib3.exceptions.HTTPError as error:
            hint = HOP_LIMIT_HINT if method == "PUT" and self._refuses_without_token() else ""
            raise SourceFailed(
                f"EC2 metadata at {self._endpoint} does not answer {method} {path}: "
                f"{type(error).__name__}",
                hint=hint,
            ) from error

    def _refuses_without_token(self) -> bool:
        """Whether a GET without a token is answered, with 401.

        Source: DataDog/datadog-agent #55269: behind a hop limit of 1 the answer to the PUT gets
        lost on the way into a container, that to a plain GET does not.
        """
        try:
            return bool(self._pool.request("GET", self._endpoint + _ACTION).status == 401)
        except urllib3.exceptions.HTTPError:
            return False

    def _refused(self, response: urllib3.BaseHTTPResponse, path: str) -> SourceFailed:
        wait_s = None
        if response.status == 429:
            wait_s = float(_whole(response.headers.get("Retry-After"), 5))
        return SourceFailed(f"EC2 metadata answers {response.status} for {path}", wait_s=wait_s)


def _whole(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else default


def is_ec2(dmi_directory: str = "/sys/class/dmi/id") -> bool:
    """Whether this machine says it is an EC2 instance.

    Source: EC2 User Guide, "Detect whether a host is an EC2 instance": the system vendor of Nitro
    instances is "Amazon EC2".
    """
    try:
        with open(f"{dmi_directory}/sys_vendor") as file:
            return file.read(64).strip() == "Amazon EC2"
    except OSError:
        return False
