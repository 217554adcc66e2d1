"""Uploading an image to the same S3 server: ours, boto3, awscrt and obstore; rate, CPU, memory.

python -m bench.upload [--gib 1.0] [--trials 5]        (pip install awscrt obstore for all of them)

Every upload is a process of its own that gets the image as a memfd and sends it once after a
warm-up. Its CPU, and how far its anonymous memory (what it holds besides the image) rises above
that after the warm-up, are the client's alone. Ours hashes (SHA-256) and has the store verify that;
awscrt sends CRC64NVME, and once SHA-256 as we do; boto3 its default CRC32; obstore no checksum. The
server verifies on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from bench.common import Goal, cpu_s, figure, report
from tests.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

THREADS = 8
CHUNK_BYTES = 16 << 20
BUCKET = "bench-bucket"
WARM_BYTES = 2 * CHUNK_BYTES
Send = Callable[[str, int], None]  # key and number of bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size_bytes = int(arguments.gib * 2**30)
    if arguments.one:
        one(arguments.one, arguments.endpoint, arguments.fd, size_bytes)
    else:
        compare(size_bytes, arguments.trials)


# ---------------------------------------------------------------- all of them, in turn


def compare(size_bytes: int, trials: int) -> None:
    fd = os.memfd_create("bench-image")
    os.ftruncate(fd, size_bytes)
    for at in range(0, size_bytes, 1 << 20):
        os.pwrite(fd, os.urandom(1 << 20), at)
    server = S3Server()
    server.start()
    names = [name for name, (module, _) in WAYS.items() if find_spec(module)]
    rates: dict[str, list[float]] = {name: [] for name in names}
    per_gib: dict[str, list[float]] = {name: [] for name in names}
    memory: dict[str, list[float]] = {name: [] for name in names}
    try:
        server.make_bucket(BUCKET)
        for _ in range(trials):
            for name in names:
                seconds, used_s, peak_bytes = measured(name, server, fd, size_bytes)
                rates[name].append(size_bytes / 1e6 / seconds)
                per_gib[name].append(used_s * 2**30 / size_bytes)
                memory[name].append(peak_bytes / 2**20)
    finally:
        server.stop()
    title = f"upload of {size_bytes / 2**30:g} GiB"
    report(title, rates, unit="MB/s", reference=OURS)
    report("client CPU", per_gib, unit="CPU-s a GiB", reference=OURS)
    report("client memory besides the image, rise to the peak", memory, unit="MiB", reference=OURS)
    rate = {name: statistics.median(values) for name, values in rates.items()}
    used = {name: statistics.median(values) for name, values in per_gib.items()}
    for name in names:
        if name != OURS:
            figure(f"upload, {name}", rate[name], "MB/s")
            figure(f"upload, {name}", used[name], "CPU-s a GiB")
    fastest = max(value for name, value in rate.items() if name != OURS)
    figure("upload, ours", rate[OURS] / fastest, "x the fastest other", Goal(least=0.95))
    figure("upload, ours", used[OURS], "CPU-s a GiB", Goal(most=1.6))
    figure(
        "upload, ours: memory besides the image",
        statistics.median(memory[OURS]),
        "MiB",
        Goal(most=CHUNK_BYTES / 2**20),
    )


def measured(name: str, server: S3Server, fd: int, size_bytes: int) -> tuple[float, float, int]:
    command = [sys.executable, "-m", "bench.upload", "--one", name, "--fd", str(fd)]
    command += ["--endpoint", server.endpoint_url, "--gib", str(size_bytes / 2**30)]
    process = subprocess.Popen(command, pass_fds=(fd,), stdout=subprocess.PIPE, text=True)
    peak_bytes = 0
    while process.poll() is None:
        peak_bytes = max(peak_bytes, anonymous_bytes(process.pid))
        time.sleep(0.02)
    assert process.stdout is not None
    seconds, used_s, warm_bytes = json.loads(process.stdout.read().splitlines()[-1])
    return seconds, used_s, max(0, peak_bytes - warm_bytes)


def anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# ---------------------------------------------------------------- one, in its own process


def one(name: str, endpoint_url: str, fd: int, size_bytes: int) -> None:
    _, way = WAYS[name]
    send = way(endpoint_url, fd)
    send(f"warm/{uuid.uuid4().hex}", WARM_BYTES)
    warm_bytes = anonymous_bytes(os.getpid())
    used_before_s, began_at = cpu_s(), time.perf_counter()
    key = f"bench/{uuid.uuid4().hex}"
    send(key, size_bytes)
    seconds, used_s = time.perf_counter() - began_at, cpu_s() - used_before_s
    boto3_client(endpoint_url).delete_object(Bucket=BUCKET, Key=key)
    print(json.dumps([seconds, used_s, warm_bytes]), flush=True)
    os._exit(0)


def ours(endpoint_url: str, fd: int) -> Send:
    """The supervisor's own hashing and upload of a set, without log and spool."""
    from supervisor.checkpoint.shards import StagedShard, hash_all
    from supervisor.checkpoint.upload import SetUpload
    from supervisor.checkpoint.workers import WorkerPool
    from supervisor.clock import SystemClock
    from supervisor.ranks.slots import SlotBuffer
    from supervisor.store.s3 import open_s3
    from supervisor.store.s3_session import S3Settings
    from supervisor.wiring import NUM_HASHERS

    settings = S3Settings(
        bucket=BUCKET,
        endpoint_url=endpoint_url,
        region=REGION,
        addressing_style="path",
        access_key_id=ACCESS_KEY_ID,
        secret_access_key=SECRET_ACCESS_KEY,
    )
    store = open_s3(settings, clock=SystemClock())
    store.probe("probe/", timeout_s=30)
    slot = SlotBuffer(os.dup(fd))
    hashers, uploaders = WorkerPool("hash", NUM_HASHERS), WorkerPool("upload", THREADS)

    def send(key: str, size_bytes: int) -> None:
        shard = StagedShard.of(0, slot, size_bytes, key=key)
        upload = SetUpload(
            store,
            [shard],
            step=1,
            timeout_s=120,
            is_cancelled=lambda: False,
            on_uploaded=lambda size: None,
        )
        upload.begin({0: key}, {})
        hash_all([shard], hashers, is_cancelled=lambda: False)
        upload.send(uploaders)
        upload.complete()

    return send


def boto3_client(endpoint_url: str):  # type: ignore[no-untyped-def]
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=Config(s3={"addressing_style": "path"}),
    )


class Part:
    """The first bytes of a descriptor as a seekable file."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd, self._size_bytes, self._at = fd, size_bytes, 0

    def read(self, count: int = -1) -> bytes:
        left = self._size_bytes - self._at
        data = os.pread(self._fd, left if count < 0 else min(count, left), self._at)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at


def boto3_upload_file(endpoint_url: str, fd: int) -> Send:
    from boto3.s3.transfer import TransferConfig

    client = boto3_client(endpoint_url)
    config = TransferConfig(
        multipart_chunksize=CHUNK_BYTES,
        max_concurrency=THREADS,
        preferred_transfer_client="classic",
    )
    total_bytes = os.fstat(fd).st_size

    def send(key: str, size_bytes: int) -> None:
        if size_bytes == total_bytes:
            client.upload_file(f"/proc/self/fd/{fd}", BUCKET, key, Config=config)
        else:
            client.upload_fileobj(Part(fd, size_bytes), BUCKET, key, Config=config)

    return send


def awscrt_crc64(endpoint_url: str, fd: int) -> Send:
    return awscrt_client(endpoint_url, fd, "CRC64NVME")


def awscrt_sha256(endpoint_url: str, fd: int) -> Send:
    return awscrt_client(endpoint_url, fd, "SHA256")


def awscrt_client(endpoint_url: str, fd: int, algorithm: str) -> Send:
    from awscrt import auth, http, io, s3

    bootstrap = io.ClientBootstrap(*_event_loop(io))
    provider = auth.AwsCredentialsProvider.new_static(ACCESS_KEY_ID, SECRET_ACCESS_KEY)
    client = s3.S3Client(
        bootstrap=bootstrap,
        region=REGION,
        signing_config=s3.create_default_s3_signing_config(
            region=REGION, credential_provider=provider
        ),
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        part_size=CHUNK_BYTES,
    )
    host = endpoint_url.removeprefix("http://")
    total_bytes = os.fstat(fd).st_size

    def send(key: str, size_bytes: int) -> None:
        headers = http.HttpHeaders([("Host", host), ("Content-Length", str(size_bytes))])
        options = {}
        body = None
        if size_bytes == total_bytes:
            options["send_filepath"] = f"/proc/self/fd/{fd}"
        else:
            body = Part(fd, size_bytes)
        client.make_request(
            type=s3.S3RequestType.PUT_OBJECT,
            request=http.HttpRequest("PUT", f"/{BUCKET}/{key}", headers, body),
            checksum_config=s3.S3ChecksumConfig(
                algorithm=s3.S3ChecksumAlgorithm[algorithm],
                location=s3.S3ChecksumLocation.TRAILER,
            ),
            **options,
        ).finished_future.result()

    return send


def _event_loop(io):  # type: ignore[no-untyped-def]
    group = io.EventLoopGroup()
    return group, io.DefaultHostResolver(group)


def obstore_put(endpoint_url: str, fd: int) -> Send:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=endpoint_url,
        access_key_id=ACCESS_KEY_ID,
        secret_access_key=SECRET_ACCESS_KEY,
        region=REGION,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def send(key: str, size_bytes: int) -> None:
        obstore.put(
            store,
            key,
            Part(fd, size_bytes),
            use_multipart=True,
            chunk_size=CHUNK_BYTES,
            max_concurrency=THREADS,
        )

    return send


OURS = "ours (with SHA-256)"
WAYS: dict[str, tuple[str, Callable[[str, int], Send]]] = {
    OURS: ("supervisor", ours),
    "boto3 upload_file": ("boto3", boto3_upload_file),
    "awscrt S3Client": ("awscrt", awscrt_crc64),
    "awscrt S3Client, SHA-256": ("awscrt", awscrt_sha256),
    "obstore put": ("obstore", obstore_put),
}

if __name__ == "__main__":
    main()
