"""Uploading an image to the same S3 server: ours beside boto3's own upload_file, rate and CPU.

python -m bench.upload [--gib 0.5]      (obstore is measured too where it is installed)
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import statistics
import uuid
from collections.abc import Callable

from bench.common import cpu_s, interleave, report
from supervisor.checkpoint.chunks import CHUNK_BYTES, chunk_ranges
from supervisor.checkpoint.workers import WorkerPool
from supervisor.clock import SystemClock
from supervisor.ranks.slots import SlotBuffer
from supervisor.store.s3 import open_s3
from supervisor.store.s3_session import S3Settings
from tests.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

THREADS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--trials", type=int, default=3)
    arguments = parser.parse_args()
    size_bytes = int(arguments.gib * 2**30)
    slot = SlotBuffer.in_memory("bench", size_bytes)
    slot.view(size_bytes)[:] = os.urandom(1 << 20) * (size_bytes >> 20)
    server = S3Server()
    server.start()
    try:
        server.make_bucket("bench-bucket")
        ways = {
            "boto3 upload_file": boto3_way(server, slot, size_bytes),
            "ours (with SHA-256)": our_way(server, slot, size_bytes),
        }
        obstore = obstore_way(server, slot, size_bytes)
        if obstore is not None:
            ways["obstore put"] = obstore
        used: dict[str, list[float]] = {name: [] for name in ways}
        taken = interleave(
            {name: counted(way, used[name]) for name, way in ways.items()},
            trials=arguments.trials,
        )
    finally:
        server.stop()
    rates = {name: [size_bytes / 1e6 / s for s in values] for name, values in taken.items()}
    reference = "boto3 upload_file"
    report(f"upload of {arguments.gib:g} GiB", rates, unit="MB/s", reference=reference)
    per_gib = {name: [s / arguments.gib for s in values] for name, values in used.items()}
    report("client CPU", per_gib, unit="CPU-s a GiB", reference=reference)
    print(f"  ours: {statistics.median(per_gib['ours (with SHA-256)']):.2f} CPU-s a GiB")


def counted(way: Callable[[], None], used: list[float]) -> Callable[[], None]:
    def run() -> None:
        before = cpu_s()
        way()
        used.append(cpu_s() - before)

    return run


def our_way(server: S3Server, slot: SlotBuffer, size_bytes: int) -> Callable[[], None]:
    store = open_s3(
        S3Settings(
            bucket="bench-bucket",
            endpoint_url=server.endpoint_url,
            region=REGION,
            addressing_style="path",
            access_key_id=ACCESS_KEY_ID,
            secret_access_key=SECRET_ACCESS_KEY,
        ),
        clock=SystemClock(),
    )
    pool = WorkerPool("bench", THREADS)

    def run() -> None:
        key = f"ours/{uuid.uuid4().hex}"
        upload = store.open_upload(
            key,
            size_bytes=size_bytes,
            chunk_bytes=CHUNK_BYTES,
            resume_token=None,
            timeout_s=60,
        )
        view = slot.view(size_bytes)

        def send(index: int, start: int, end: int) -> bytes:
            digest = hashlib.sha256(view[start:end]).digest()
            upload.put_chunk(index, view[start:end], sha256=digest, timeout_s=120)
            return digest

        futures = [
            pool.submit(lambda i=index, a=start, b=end: send(i, a, b))
            for index, (start, end) in enumerate(chunk_ranges(size_bytes, CHUNK_BYTES))
        ]
        upload.complete([future.result() for future in futures], timeout_s=60)
        store.delete(key, timeout_s=30)

    return run


def boto3_way(server: S3Server, slot: SlotBuffer, size_bytes: int) -> Callable[[], None]:
    from boto3.s3.transfer import TransferConfig

    client = server.client()
    config = TransferConfig(multipart_chunksize=CHUNK_BYTES, max_concurrency=THREADS)
    path = f"/proc/self/fd/{slot.fd}"

    def run() -> None:
        client.upload_file(path, "bench-bucket", "boto3", Config=config)
        client.delete_object(Bucket="bench-bucket", Key="boto3")

    return run


def obstore_way(server: S3Server, slot: SlotBuffer, size_bytes: int) -> Callable[[], None] | None:
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        return None
    store = S3Store(
        "bench-bucket",
        endpoint=server.endpoint_url,
        access_key_id=ACCESS_KEY_ID,
        secret_access_key=SECRET_ACCESS_KEY,
        region=REGION,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def run() -> None:
        with open(slot.fd, "rb", closefd=False) as file:
            file.seek(0, io.SEEK_SET)
            obstore.put(store, "obstore", file, chunk_size=CHUNK_BYTES, max_concurrency=THREADS)
        obstore.delete(store, "obstore")

    return run


if __name__ == "__main__":
    main()
