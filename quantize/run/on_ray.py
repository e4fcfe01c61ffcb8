"""The executor of a Ray cluster: every shard is a task, on whichever node has room. OUT lies on a file system that all
nodes share, and so does SRC, or what comes of it from the Hub. This process fetches that, keeps the one journal, gives
finished shards their names, and finishes.

Ray is imported when the first cluster is asked for.
"""

import pickle
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from threading import Event
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.reader import TensorReader
from kizami.quantize.calibrated.solver import libraries, linears, makers
from kizami.quantize.max_memory import base_bytes, crew_within
from kizami.quantize.on_device.names import CPU
from kizami.quantize.plan import PLAN_FORMAT, Plan, Shard
from kizami.quantize.run.job import Job, Record
from kizami.quantize.run.job_folder import remove_attempts
from kizami.quantize.run.ray_task import Answer, Parcel, convert_one, journal_begin
from kizami.quantize.run.supply import Supply
from kizami.quantize.settings import GIVEN
from kizami.quantize.threads import Stopped, available_cores

INSTALL = "pip install 'kizami[ray]'"
TRIES = 4  # of a shard whose worker or node is lost
PAUSE = 0.2  # seconds between two looks at `stop`
KNOCK = 10.0  # seconds for a cluster to take a connection
RAY_BYTES = 90 << 20  # of Ray in a worker's process
GRACE = 5.0  # seconds in which cancelled tasks may clean up


def load_ray() -> Any:
    """KizamiError "missing_package"."""
    try:
        import ray
    except ImportError:
        raise KizamiError(
            "--executor ray needs Ray, which is not installed", code="missing_package", hint=INSTALL
        ) from None
    return ray


@dataclass(slots=True)
class RayCluster:
    """address: as `ray.init` takes it. workers: cores of a task, each of which has one shard; None for one, and for all
    of a machine like this one with `gptq`. max_memory: bytes of a task's process, at most."""

    address: str = "auto"
    workers: int | None = None
    max_memory: int | None = None
    _joined: bool = field(default=False, init=False)

    def check(self, plan: Plan) -> None:
        """Joins the cluster. KizamiError "missing_package", "no_cluster", "bad_option", "max_memory"."""
        if plan.method.name in GIVEN:
            raise KizamiError(
                f"--executor ray with --method {plan.method.name}, which works in one process",
                code="bad_option",
                hint="leave --executor out",
            )
        wanted = self._cores(plan)
        if self.max_memory is not None:
            check_tasks(self.max_memory, plan, wanted)
        ray = load_ray()
        if not ray.is_initialized():
            self._join(ray)
        most = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
        if most < wanted:
            raise KizamiError(
                f"--workers {wanted} are the cores of one task, and the largest node has {most}",
                code="bad_option",
                hint="give fewer --workers, or start the cluster's nodes first",
            )

    def _cores(self, plan: Plan) -> int:
        """Of a task. A solve takes all cores of its machine, whoever else is there."""
        return self.workers or (available_cores() if plan.method.name == "gptq" else 1)

    def _join(self, ray: Any) -> None:
        self._knock()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as e:
            raise self._no_cluster(_first_line(e)) from None
        finally:
            for number, handler in handlers.items():  # Ray takes SIGTERM for itself
                signal.signal(number, handler)
        self._joined = True

    def _knock(self) -> None:
        """Ray itself waits for minutes where nobody answers."""
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal():  # auto, or what Ray will judge
            return
        try:
            socket.create_connection((host.strip("[]"), int(port)), KNOCK).close()
        except (OSError, OverflowError) as e:
            raise self._no_cluster(str(e)) from None

    def _no_cluster(self, said: str) -> KizamiError:
        return KizamiError(
            f"no Ray cluster at {self.address}: {said}",
            code="no_cluster",
            hint="start one: `ray start --head` here, `ray start --address=HOST:6379` on the other machines",
        )

    def convert(self, job: Job, todo: Sequence[Shard], record: Record, stop: Event) -> None:
        """As `Executor`. A shard whose worker is lost is converted again, by another one."""
        with redirect_stdout(sys.stderr):  # Ray prints there that a node is dead, whatever it was told about logs
            try:
                if todo:
                    with _source(job, todo, stop) as supply:
                        _Tasks(load_ray(), self._cores(job.plan), self.max_memory, job, record, supply).run(todo, stop)
            finally:
                if self._joined:
                    load_ray().shutdown()
                    self._joined = False


def check_tasks(limit: int, plan: Plan, workers: int) -> None:
    """KizamiError "max_memory" where a shard is too large for a task of its own."""
    for shard in plan.shards:
        alone = replace(plan, steps=shard.steps, shards=(shard,))
        crew_within(limit, alone, workers, base=base_bytes(alone) + RAY_BYTES, finishes=False)


@contextmanager
def _source(job: Job, todo: Sequence[Shard], stop: Event) -> Iterator[Supply | None]:
    """Of a source on the Hub: this process fetches, and the nodes read what came. None of one on the disk."""
    if job.remote.mirror is None:
        yield None
        return
    with (
        TensorReader(job.checkpoint) as reader,
        Supply(job.remote.mirror, job.checkpoint, todo, reader, stop, job.remote.limit) as supply,
    ):
        yield supply


class _Tasks:
    """Those of a run. waiting: task -> its shard, and how often that was lost."""

    def __init__(
        self, ray: Any, workers: int, max_memory: int | None, job: Job, record: Record, supply: Supply | None
    ) -> None:
        self._ray, self._job, self._record, self._delivery = ray, job, record, job.remote.delivery
        self._supply = supply
        solves = job.plan.method.name == "gptq"
        self._linears = linears(job.plan.steps) if solves else {}
        stats = None if job.statistics is None else str(job.statistics.root.absolute())
        partial = record.journal.partial.absolute()
        self._errand = ray.put(
            {
                "version": version("kizami"),
                "plan_format": PLAN_FORMAT,
                "source": str(job.checkpoint.root),
                "partial": str(partial),
                "journal": journal_begin(partial),
                "stats": stats,
                "libraries": libraries(CPU) if solves else None,
                "workers": workers,
                "max_memory": max_memory,
            }
        )
        # Retries are ours: Ray's would not tell which shard was lost, and where
        self._task = ray.remote(num_cpus=workers, max_retries=0, scheduling_strategy="SPREAD")(convert_one)
        self._waiting: dict[Any, tuple[Shard, int]] = {}

    def run(self, todo: Sequence[Shard], stop: Event) -> None:
        if self._delivery is not None:
            for done in list(self._record.journal.done.values()):
                if not self._delivery.is_there(done):
                    self._delivery.hand(done)
        unsent = deque(todo)
        try:
            while unsent or self._waiting:
                if stop.is_set():
                    raise Stopped
                if unsent and (self._supply is None or self._supply.has(unsent[0])):
                    self._send(unsent.popleft(), 0)
                    continue
                for task in self._ready():
                    self._take(task)
        finally:
            self._cancel()

    def _ready(self) -> list[Any]:
        """Tasks that have ended, after a pause at most."""
        if not self._waiting:
            time.sleep(PAUSE)
            return []
        ready, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=PAUSE)
        return list(ready)

    def _send(self, shard: Shard, lost: int) -> None:
        mirror = self._job.remote.mirror
        contents = self._job.contents if mirror is None else mirror.contents()
        others = makers(shard.steps, self._linears)
        parcel = Parcel.of(self._job.plan, self._job.checkpoint, shard, contents, others)
        self._waiting[self._task.remote(self._errand, pickle.dumps(parcel))] = shard, lost

    def _take(self, task: Any) -> None:
        shard, lost = self._waiting.pop(task)
        try:
            answer: Answer = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as e:
            raise _broken(e) from None
        except self._ray.exceptions.RayError as e:
            if lost + 1 == TRIES:
                raise KizamiError(
                    f"its worker was lost {TRIES} times: {_first_line(e)}",
                    code="worker_lost",
                    file=shard.file,
                    hint="see Ray's logs; a node without memory for it ends like this. The same command resumes",
                ) from None
            self._record.lost(shard, _first_line(e))
            self._send(shard, lost + 1)
            return
        if answer.refusal is not None or answer.finished is None:
            raise answer.refusal or AssertionError(answer)
        if self._supply is not None:
            self._supply.take_back(shard)
        done = self._record.shard(shard, answer.finished, answer.seconds, told=False)
        if self._delivery is not None:
            self._delivery.hand(done)

    def _cancel(self) -> None:
        """What still runs ends, after a while by force. A shard that was ready before its task heard of that is kept;
        of the others nothing stays."""
        self._call_off(list(self._waiting))
        unfinished = []
        for task, (shard, _) in self._waiting.items():
            try:
                answer: Answer | None = self._ray.get(task, timeout=0)
            except self._ray.exceptions.RayError:  # called off
                answer = None
            if answer is not None and answer.finished is not None:
                self._record.shard(shard, answer.finished, answer.seconds, told=False)
            else:
                unfinished.append(shard.file)
        with suppress(OSError):  # the next run looks for them, too
            remove_attempts(self._record.journal.partial, unfinished)

    def _call_off(self, left: list[Any]) -> None:
        for force in (False, True):
            for task in left:
                self._ray.cancel(task, force=force)
            end = time.monotonic() + GRACE
            while left and time.monotonic() < end:
                _, left = self._ray.wait(left, num_returns=len(left), timeout=PAUSE)
            if not left:
                return


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _broken(error: BaseException) -> KizamiError:
    """A task that ended with what is none of kizami's refusals: a worker without kizami, or a bug."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    where = re.search(r"\bip=([0-9a-f.:]+)", str(error))  # in Ray's traceback
    return KizamiError(
        f"a task on node {where[1] if where else 'unknown'} failed: {lines[-1]}",
        code="task_failed",
        hint="every node needs the same Python, kizami and Ray as this one",
    )
