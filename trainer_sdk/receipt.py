"""What a restore gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from trainer_sdk.tree import dump_json

FRESH = "fresh"
# A message holds no longer one; a receipt is far shorter unless thousands of names do not fit.
_MAX_JSON = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was restored exactly, approximately or not, by name.

    `source` is fresh, memory, spool or store. `digest` covers a sample of every tensor and the
    JSON state; equal states have equal digests. `was_polling`: the interrupted life stopped inside
    `run.poll()`, so the code after that boundary (an evaluation, say) did not run to its end.
    """

    step: int = 0
    epoch: int = 0
    source: str = FRESH
    seconds: float = 0.0
    exactly: tuple[str, ...] = ()
    approximately: dict[str, str] = field(default_factory=dict)
    not_restored: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    was_polling: bool = False

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was restored, because there was nothing."""
        return self.source == FRESH

    def to_json(self) -> str:
        """For the supervisor's status."""
        text = dump_json(asdict(self)).decode()
        if len(text) <= _MAX_JSON:
            return text
        counts = {"num_not_restored": str(len(self.not_restored))}
        short = replace(self, exactly=self.exactly[:100], approximately={}, not_restored=counts)
        return dump_json(asdict(short)).decode()

    def __str__(self) -> str:
        if self.is_fresh:
            return "fresh start: no checkpoint to restore"
        head = (
            f"restored step {self.step} (epoch {self.epoch}) from {self.source} "
            f"in {self.seconds:.2f} s, digest {self.digest[:12]}"
        )
        rows = [("exactly", name, "") for name in self.exactly]
        rows += [("approximately", *item) for item in self.approximately.items()]
        rows += [("not restored", *item) for item in self.not_restored.items()]
        width = max((len(name) for _, name, _ in rows), default=0)
        lines = [f"  {how:<13}  {name:<{width}}  {why}".rstrip() for how, name, why in rows]
        return "\n".join([head, *lines])
