"""The run: what the training loop calls, and what happens at a step boundary."""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from trainer_sdk.errors import Preempted, TrainerSdkError, UsageError
from trainer_sdk.protocol import environment
from trainer_sdk.protocol.control_page import ACT_AT, BEAT_NS, NEVER, STEP
from trainer_sdk.receipt import Receipt
from trainer_sdk.refusal import tell_anew, tell_if_fatal
from trainer_sdk.registry import Registry, UserValues
from trainer_sdk.session import Moment, Session, new_hello, open_session

log = logging.getLogger("trainer_sdk")

_PAGE_WORDS = 512
_MAX_LOOK_INTERVAL = 4096

_active: Run | None = None
_active_lock = threading.Lock()


def attach(objects: Mapping[str, Any]) -> Run:
    """Create this process's run; see `trainer_sdk.attach`."""
    global _active
    with _active_lock:
        try:
            if _active is not None:
                raise UsageError(
                    "this process has a run already",
                    hint="call finish() on it before attaching again",
                )
            _check_holder()
            _active = run = Run(objects)
        except TrainerSdkError as error:
            raise _told(error, _active) from None
    return run


def _check_holder() -> None:
    """A rank has one run: a second one would have the supervisor take it for a rank started anew.

    Raises:
        UsageError: a living process, which this one descends from, holds the run.
    """
    holder = os.environ.get(environment.HOLDER, "")
    if holder in ("", str(os.getpid())) or not os.path.exists(f"/proc/{holder}"):
        return
    raise UsageError(
        f"this rank's run is in process {holder}, and this is its child {os.getpid()}",
        hint="call attach() in the process that trains, and only there",
    )


def _leave_to_parent() -> None:
    """In a forked child: the run is the parent's, and so are its page and its socket."""
    global _active, _active_lock
    _active_lock = threading.Lock()
    run, _active = _active, None
    if run is not None:
        run.disown()


os.register_at_fork(after_in_child=_leave_to_parent)


def _told(error: TrainerSdkError, run: Run | None) -> TrainerSdkError:
    """The error for the script: without our own frames, and told to the supervisor if it turns
    out to end the process."""
    path = os.environ.get(environment.SOCKET)
    if path:
        session = run._session if run is not None else None
        hello = session.hello if session is not None else new_hello()

        def tell(reason: str) -> None:
            if session is None or not session.refuse(reason):
                tell_anew(reason, path, hello)

        tell_if_fatal(error, tell)
    return error.with_traceback(None)


def _forget(run: Run) -> None:
    global _active
    with _active_lock:
        if _active is run:
            _active = None


class Run:
    """One training run of this process.

    Invariant: `global_step` counts completed steps, and the control page shows it before the run
    looks whether anything is asked for at that boundary.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.global_step = 0
        self.receipt: Receipt | None = None
        self._registry = Registry()
        self._words: Any
        self._use_dummy_page()
        # The next step at which to look closer than the control page asks for; 0 is at once.
        self._look_at = 0
        self._look_interval = 1
        self._epoch = 0
        self._is_closed = False
        self._is_dirty = False
        self._loaders: tuple[Any, ...] = ()
        self._mark = 0
        self._hooks: list[Any] = []
        self._session: Session | None = None
        self._hook(self._registry.add_all(objects))
        self._session = open_session(self._registry, self._attend)
        if self._session is not None:
            os.environ[environment.HOLDER] = str(os.getpid())
        else:
            log.warning("no supervisor (LASTGASP_SOCKET is not set): nothing will be saved")

    # ------------------------------------------------------------ the training loop

    def restore(self) -> Receipt:
        """Restore the newest checkpoint, if there is one. To be called before the first step.

        Raises:
            RestoreError: the checkpoint and the script do not fit together, or it is damaged.
            RejectedBySupervisor: this process may not take part.
        """
        if self.receipt is not None or self._is_closed:
            raise _told(UsageError("restore() is called once, before the first step"), self)
        if self._session is None:
            self.receipt = Receipt()
            return self.receipt
        try:
            self.receipt = self._session.restore()
        except TrainerSdkError as error:  # the supervisor heard of it already
            raise error.with_traceback(None) from None
        self.global_step = self.receipt.step
        self._epoch = self.receipt.epoch
        self._words = self._session.page_words()
        self._words[STEP] = self.global_step
        self._mark = self._position()
        self._look_at = self.global_step + 1
        self._session.report_restored(self.receipt)
        return self.receipt

    def step(self) -> None:
        """Mark a step boundary: call it once after each optimizer step.

        Raises:
            Preempted: all ranks stop here; the state is saved.
        """
        step = self.global_step + 1
        self.global_step = step
        self._is_dirty = False
        mark = 0
        for loader in self._loaders:
            mark += loader.position
        self._mark = mark
        words = self._words
        # The order matters: the supervisor writes ACT_AT before it reads STEP; see control_page.
        words[STEP] = step
        words[BEAT_NS] = time.monotonic_ns()
        if step >= words[ACT_AT] or step >= self._look_at:
            self._at_boundary(step)

    def poll(self) -> None:
        """Show life in a long phase between steps; stops there too if nothing changed since the
        last boundary.

        Raises:
            Preempted: all ranks stop; the state of the last boundary is saved.
        """
        self._words[BEAT_NS] = time.monotonic_ns()
        if self._session is None or self.receipt is None or self._is_closed:
            return
        if self._words[ACT_AT] <= self.global_step and self._is_unchanged():
            self._guarded(self._session.hold_at_poll, self._moment(is_polling=True))

    def save(self) -> None:
        """Ask for a checkpoint at the next boundary that all ranks can reach."""
        if self._session is not None:
            self._session.request_save()

    def finish(self) -> None:
        """Training is over: save the final state and tell the supervisor. Calling it again does
        nothing.

        Raises:
            Preempted: the supervisor stopped the job at the same time.
        """
        if self._is_closed:
            return
        try:
            session = self._session if self.receipt is not None else None
            if session is not None and self._has_stepped():
                self._guarded(session.finish, self._moment())
        finally:
            self.close()

    def _has_stepped(self) -> bool:
        """Without a single boundary there is nothing to save and no end to record.

        Raises:
            UsageError: there was training all the same.
        """
        if self.global_step > 0:
            return True
        if self._is_dirty:
            error = UsageError(
                "training ended, but run.step() was never called: nothing was saved",
                hint="call run.step() once after each optimizer step",
            )
            raise _told(error, self)
        log.warning("nothing was trained: there is no checkpoint, and the end is not recorded")
        return False

    # ------------------------------------------------------------ state

    @property
    def user(self) -> UserValues:
        """Plain values of the script that are saved and restored with the rest."""
        return self._registry.user

    @property
    def epoch(self) -> int:
        """The epoch under way: of the training loader, or as `epochs()` counts."""
        return self._loaders[0].epoch if self._loaders else self._epoch

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Epoch numbers from the interrupted one up to `num_epochs`."""
        for epoch in range(self.epoch, num_epochs):
            self._epoch = epoch
            if self._loaders:
                self._loaders[0].set_epoch(epoch)
            yield epoch

    def register(self, **objects: Any) -> None:
        """Add objects later. One that the checkpoint holds takes its saved state at once.

        Raises:
            UnsupportedState, UsageError: nothing was registered.
            RestoreError: an object does not fit what was saved under its name.
        """
        try:
            added = self._registry.add_all(objects)
            self._hook(added)
            for name in self._registry.adopt_carried(added):
                log.info("%s took the state that was saved for it", name)
        except TrainerSdkError as error:
            raise _told(error, self) from None
        self._look_at = 0

    # ------------------------------------------------------------ context

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def close(self) -> None:
        """Let go of everything without saying that training is over."""
        if self._is_closed:
            return
        self._epoch = self.epoch
        self._loaders = ()
        self._is_closed = True
        self._look_at = 0
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._session is not None:
            self._use_dummy_page()  # the page goes away with the session; counting goes on
            self._session.close()
            os.environ.pop(environment.HOLDER, None)
        self._registry.release()
        _forget(self)

    def disown(self) -> None:
        """Only count from now on: this is a forked child, the run is its parent's."""
        self._use_dummy_page()
        self._session = None
        self._look_at = NEVER

    # ------------------------------------------------------------ inside

    def _use_dummy_page(self) -> None:
        self._words = array("Q", [0] * _PAGE_WORDS)
        self._words[ACT_AT] = NEVER

    def _hook(self, added: list[Any]) -> None:
        self._loaders = tuple(self._registry.loaders)
        optimizers = {each.name: each for each in self._registry.optimizers}
        for target in added:
            if target.name in optimizers:
                optimizer = optimizers[target.name].optimizer
                self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer))
                self._hooks.append(optimizer.register_step_post_hook(self._after_optimizer))

    def _before_optimizer(self, *_: object) -> None:
        if self._session is not None:
            self._session.stager.release_tensors()

    def _after_optimizer(self, *_: object) -> None:
        self._is_dirty = True

    def _attend(self) -> None:
        """Called from the link's thread: look at the next boundary."""
        self._look_at = 0

    def _position(self) -> int:
        return sum(loader.position for loader in self._loaders)

    def _is_unchanged(self) -> bool:
        """Whether the state is still that of the last boundary."""
        if self._is_dirty or self._position() != self._mark:
            return False
        is_training = any(each.module.training for each in self._registry.modules)
        return bool(self._loaders) or not is_training

    def _moment(self, *, is_polling: bool = False) -> Moment:
        return Moment(step=self.global_step, epoch=self.epoch, is_polling=is_polling)

    def _at_boundary(self, step: int) -> None:
        if self._is_closed:
            raise _told(UsageError("the run is finished"), self)
        if self.receipt is None:
            self.global_step -= 1
            raise _told(
                UsageError("call restore() before the first step", hint="run.restore()"), self
            )
        if self._session is None:
            self._look_at = NEVER
            return
        is_due = self._take_look(step)
        self._guarded(self._session.at_boundary, self._moment(), is_due)
        self._words = self._session.page_words()

    def _take_look(self, step: int) -> bool:
        """Plan the next look; True if the state's structure is to be looked at now.

        Looks come at doubling distances from the restore, at the same steps on all ranks.
        """
        is_due = step >= self._next_due
        if is_due:
            self._next_due = step + self._look_interval
            self._look_interval = min(self._look_interval * 2, _MAX_LOOK_INTERVAL)
        self._look_at = self._next_due
        return is_due

    _next_due = 0

    def _guarded(self, act: Any, *arguments: Any) -> None:
        """No failure of ours stops training."""
        try:
            act(*arguments)
        except Preempted:
            self.close()
            raise
        except Exception:  # whatever it is, the training process is worth more
            log.exception("the checkpointing of this rank failed; training goes on")
