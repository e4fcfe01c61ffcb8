"""The executor of one machine: threads."""

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from threading import Event, Semaphore
from typing import TYPE_CHECKING

from kizami.formats.reader import TensorReader
from kizami.formats.run_log import FOLDER
from kizami.quantize.calibrated.solver import SOLVER_WORKERS
from kizami.quantize.calibrated.statistics import calibration_of
from kizami.quantize.given import Given
from kizami.quantize.linear import quantize_linear
from kizami.quantize.max_memory import Crew, crew_here, memory_of, pieces_in_flight
from kizami.quantize.on_device.names import CPU
from kizami.quantize.plan import Plan, Shard
from kizami.quantize.run.job import Job, Record
from kizami.quantize.run.journal import Journal
from kizami.quantize.run.supply import Supply
from kizami.quantize.settings import GIVEN
from kizami.quantize.shard import Shop, convert_shard
from kizami.quantize.threads import available_cores, drivers_for
from kizami.quantize.warm_up import warm_up

if TYPE_CHECKING:
    from kizami.quantize.on_device.compute import Compute


@dataclass(slots=True)
class LocalPool:
    """workers: threads that compute; None for all cores. compute: who packs linears, in place of the job's device.
    max_memory: bytes of this process, at most; not with a device. finishes: as `crew_within`."""

    workers: int | None = None
    compute: "Compute | None" = None
    max_memory: int | None = None
    finishes: bool = True
    _crew: Crew | None = field(default=None, init=False)

    def check(self, plan: Plan) -> None:
        """KizamiError "max_memory"."""
        if self.max_memory is not None:
            warm_up(plan)  # so that it is known what the process has
            workers = self.workers or available_cores()
            self._crew = crew_here(self.max_memory, plan, workers, finishes=self.finishes)

    def convert(self, job: Job, todo: Sequence[Shard], record: Record, stop: Event) -> None:
        """Shards are driven by a few threads (they write and hash); all of them share one pool that computes.

        numba, hashlib and the file calls release the GIL, so threads scale like processes and need no copies.
        """
        plan, journal, delivery = job.plan, record.journal, job.remote.delivery
        crew = self._crew
        workers = self.workers or available_cores() if crew is None else crew.workers
        compute = self.compute or _on_device(job)
        if compute is not None:
            assert crew is None, "what a device takes of this process's memory is not known"
            workers = max(workers, compute.lanes)  # a thread waits while a device works
        if plan.method.name == "gptq":
            workers = min(workers, SOLVER_WORKERS)
        drivers = drivers_for(workers, len(todo)) if crew is None else max(1, min(crew.drivers, len(todo)))
        with TensorReader(job.checkpoint) as reader, ExitStack() as stack:
            supply = _supply(job, todo, journal, reader, stop)
            if supply is not None:
                stack.enter_context(supply)
            pool = ThreadPoolExecutor(workers, "kizami-compute") if workers > 1 else None
            lead = ThreadPoolExecutor(drivers, "kizami-shard")
            slots = Semaphore(pieces_in_flight(workers, drivers))
            calibration = stack.enter_context(
                calibration_of(plan, job.statistics, reader, held=drivers + 1, device=job.device, stop=stop)
            )
            given = Given(journal.partial / FOLDER, plan) if plan.method.name in GIVEN and todo else None
            buffers, limit = memory_of(plan, workers, crew)
            shop = Shop(
                plan, reader, buffers, journal.partial, pool, slots, stop, record.piece, calibration, given,
                journal.attempt, quantize_linear if compute is None else compute.quantize, limit,
            )  # fmt: skip

            def convert(shard: Shard) -> None:
                with nullcontext() if supply is None else supply.lend(shard):
                    started = time.monotonic()
                    finished = convert_shard(shop, shard)
                done = record.shard(shard, finished, time.monotonic() - started)
                if delivery is not None:
                    delivery.hand(done)

            try:
                if todo:
                    warm_up(plan)
                _wait_for_first_failure([lead.submit(convert, shard) for shard in todo])
            finally:
                stop.set()
                for executor in (lead, pool):
                    if executor is not None:
                        executor.shutdown(wait=True, cancel_futures=True)
                if given is not None:
                    given.close()


def _on_device(job: Job) -> "Compute | None":
    """None where the threads pack. gptq's device solves."""
    if job.device == CPU or job.plan.method.name == "gptq":
        return None
    from kizami.quantize.on_device.compute import compute_on

    return compute_on(job.device)


def _supply(job: Job, todo: Sequence[Shard], journal: Journal, reader: TensorReader, stop: Event) -> Supply | None:
    """None where nothing comes and nothing goes. What an earlier run has finished and not sent is sent now."""
    remote, delivery = job.remote, job.remote.delivery
    waiting = [] if delivery is None else [done for done in journal.done.values() if not delivery.is_there(done)]
    supply = None
    if remote.mirror is not None or remote.sheds:
        kept = {record.number: record.nbytes for record in waiting} if remote.sheds else {}
        supply = Supply(
            remote.mirror, job.checkpoint, todo, reader, stop, remote.limit, outputs=remote.sheds, kept=kept
        )
    if delivery is not None:
        if supply is not None and delivery.delete:
            delivery.on_gone, delivery.on_error = supply.gone, supply.fail
            delivery.short, supply.on_short = lambda: supply.short, delivery.nudge
            delivery.forget([done for done in journal.done.values() if done not in waiting])
        for record in waiting:
            delivery.hand(record)
    return supply


def _wait_for_first_failure(futures: list[Future[None]]) -> None:
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:  # of failures that came together, that of the first shard
        if future in done:
            future.result()
