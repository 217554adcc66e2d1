"""Every Prometheus metric, declared in one place. Base units, small closed label sets."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)


def own_version() -> str:
    """The installed version of lastgasp."""
    try:
        return version("lastgasp")
    except PackageNotFoundError:
        return "unknown"


class Metrics:
    """The metrics of one daemon, in a registry of their own."""

    def __init__(self, phases: list[str]) -> None:
        self.registry = registry = CollectorRegistry()
        self._phases = phases
        self.build = Gauge(
            "lastgasp_build_info", "Version", ["version", "python"], registry=registry
        )
        self.build.labels(own_version(), platform.python_version()).set(1)
        self.job_state = Gauge(
            "lastgasp_job_state", "1 for the phase the job is in", ["state"], registry=registry
        )
        self.notices = Counter(
            "lastgasp_preemption_notices_total", "Notices", ["source"], registry=registry
        )
        self.deadline = Gauge(
            "lastgasp_preemption_deadline_timestamp_seconds",
            "Wall time of the standing notice's deadline, 0 without one",
            registry=registry,
        )
        self.emergency = Counter(
            "lastgasp_emergency_saves_total", "Evacuations", ["result"], registry=registry
        )
        self.emergency_phase = Histogram(
            "lastgasp_emergency_phase_duration_seconds",
            "Time of each part of an evacuation",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.emergency_margin = Gauge(
            "lastgasp_emergency_margin_seconds",
            "Deadline minus commit of the last evacuation; negative if missed",
            registry=registry,
        )
        self.predicted = Gauge(
            "lastgasp_predicted_emergency_seconds",
            "What an evacuation would need now, by 95th percentiles",
            registry=registry,
        )
        self.committed_step = Gauge(
            "lastgasp_checkpoint_last_committed_step", "Step", registry=registry
        )
        self.committed_at = Gauge(
            "lastgasp_checkpoint_last_committed_timestamp_seconds", "Wall time", registry=registry
        )
        self.local_at = Gauge(
            "lastgasp_checkpoint_last_local_timestamp_seconds", "Wall time", registry=registry
        )
        self.size = Gauge("lastgasp_checkpoint_size_bytes", "Of the last one", registry=registry)
        self.save_duration = Histogram(
            "lastgasp_checkpoint_save_duration_seconds",
            "From staged to committed",
            buckets=_SECONDS,
            registry=registry,
        )
        self.save_failures = Counter(
            "lastgasp_checkpoint_save_failures_total", "Failed saves", ["error"], registry=registry
        )
        self.blocked = Counter(
            "lastgasp_training_blocked_seconds_total",
            "Time training waited for us",
            ["reason"],
            registry=registry,
        )
        self.training_step = Gauge("lastgasp_training_step", "Step", registry=registry)
        self.upload_bytes = Counter("lastgasp_upload_bytes_total", "Bytes", registry=registry)
        self.upload_pending = Gauge("lastgasp_upload_pending_bytes", "Bytes", registry=registry)
        self.upload_retries = Counter(
            "lastgasp_upload_errors_total", "Failed requests", ["error"], registry=registry
        )
        self.restore_duration = Histogram(
            "lastgasp_restore_duration_seconds", "Fetch", ["source"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.restore_bytes = Counter(
            "lastgasp_restore_bytes_total", "Bytes", ["source"], registry=registry
        )
        self.relaunch_duration = Histogram(
            "lastgasp_relaunch_duration_seconds",
            "From launch",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.restarts = Counter(
            "lastgasp_restarts_total", "Relaunches", ["reason"], registry=registry
        )
        self.ranks_expected = Gauge("lastgasp_sdk_ranks_expected", "Ranks", registry=registry)
        self.ranks_connected = Gauge("lastgasp_sdk_ranks_connected", "Ranks", registry=registry)
        self.heartbeat_age = Gauge(
            "lastgasp_sdk_heartbeat_age_seconds", "Freshest sign of life", registry=registry
        )
        self.peers_refused = Counter(
            "lastgasp_peers_refused_total", "Connections ended or not let in", ["error"],
            registry=registry,
        )  # fmt: skip
        self.polls = Counter(
            "lastgasp_metadata_polls_total", "Looks at notice sources", ["provider", "result"],
            registry=registry,
        )  # fmt: skip
        self.spool_failures = Counter(
            "lastgasp_spool_failures_total",
            "Checkpoints without a local copy, by what the disk did",
            ["error"],
            registry=registry,
        )
        self.spool_suspect = Gauge(
            "lastgasp_spool_suspect",
            "1 once the local disk failed an input or output: it is not used any more in this life",
            registry=registry,
        )
        self.spool_duration = Histogram(
            "lastgasp_spool_duration_seconds",
            "From staged to spooled",
            buckets=_SECONDS,
            registry=registry,
        )
        self.log_lines_dropped = Counter(
            "lastgasp_log_lines_dropped_total", "Lines nobody read in time", registry=registry
        )
        self.disk_free = Gauge("lastgasp_local_disk_free_bytes", "Spool", registry=registry)
        self.set_phase(phases[0])

    def set_phase(self, phase: str) -> None:
        """Mark the one phase the job is in."""
        for name in self._phases:
            self.job_state.labels(name).set(1 if name == phase else 0)
