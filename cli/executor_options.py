"""The options of `kizami convert` that say which machines do it: `--shards`, `--executor`."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kizami.cli import options as o
from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from kizami.quantize.max_memory import Crew
    from kizami.quantize.plan import Plan
    from kizami.quantize.run.job import Executor
    from kizami.quantize.run.parts import Part

ExecutorName = Literal["local", "ray"]

Workers = Annotated[
    int | None,
    o.option(
        "--workers",
        panel=o.RUN,
        metavar="N",
        min=1,
        max=4096,
        help="Threads. Default: all cores. With --executor ray the cores of each task, by default 1, of gptq all.",
    ),
]
MaxMemory = Annotated[
    str | None,
    o.option(
        "--max-memory",
        panel=o.RUN,
        metavar="SIZE",
        help="The most memory to take, 2GB for example: fewer threads, and fewer tensors at a time. Of each process "
        "with --shards, of each task with --executor ray. Default: what --workers take.",
    ),
]
Shards = Annotated[
    str | None,
    o.option(
        "--shards",
        panel=o.RUN,
        metavar="A-B/N",
        help="Convert only shards A to B (or A) of the plan's N, beside other processes that convert others into the "
        "same OUT; the same command without --shards finishes. SRC in a folder, no --push-to.",
    ),
]
ExecutorOption = Annotated[
    ExecutorName,
    o.option(
        "--executor",
        panel=o.RUN,
        help="Where shards are converted: local (default), or ray, each as a task of a cluster whose nodes share the "
        "file system of SRC and OUT.",
    ),
]
RayAddress = Annotated[
    str | None,
    o.option(
        "--ray-address",
        panel=o.RUN,
        metavar="ADDRESS",
        help="The cluster: HOST:6379, or auto (default), the one that this machine is a node of.",
    ),
]


@dataclass(frozen=True, slots=True)
class Where:
    """As it was written. max_memory: bytes."""

    shards: str | None
    executor: ExecutorName
    ray_address: str | None
    workers: int | None
    max_memory: int | None = None

    @property
    def on_disk(self) -> bool:
        """Whether SRC must be a folder: other processes begin with it, too."""
        return self.shards is not None

    def made(self) -> "Executor":
        if self.executor == "ray":
            from kizami.quantize.run.on_ray import RayCluster

            return RayCluster(self.ray_address or "auto", self.workers, self.max_memory)
        from kizami.quantize.run.local_pool import LocalPool

        return LocalPool(self.workers, max_memory=self.max_memory)

    def crew(self, plan: "Plan") -> "Crew | None":
        """Of this machine, within --max-memory. KizamiError "max_memory", also of a cluster's tasks."""
        from kizami.quantize.max_memory import crew_within
        from kizami.quantize.threads import available_cores

        if self.max_memory is None:
            return None
        if self.executor == "ray":
            from kizami.quantize.run.on_ray import check_tasks

            check_tasks(self.max_memory, plan, self.workers or 1)
            return None
        return crew_within(self.max_memory, plan, self.workers or available_cores(), finishes=self.shards is None)

    def part(self, context: typer.Context) -> "Part | None":
        """Of --shards. KizamiError "bad_option"."""
        from kizami.quantize.run.parts import Part

        if self.shards is None:
            return None
        given = o.spelled(context, "shards")
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?/(\d{1,5})\s*", self.shards, re.ASCII)
        first, last, of = (0, 0, 0) if match is None else (int(match[1]), int(match[2] or match[1]), int(match[3]))
        if not 1 <= first <= last <= of:
            raise KizamiError(
                f"{given} {printable(self.shards, 60)}; expected A-B/N or A/N with 1 <= A <= B <= N",
                code="bad_option",
                hint="write 1-45/91 for the first 45 of 91 shards; kizami plan tells their number",
            )
        return Part(first, last, of)

    def check(
        self, context: typer.Context, *, engine: str, push_to: str | None, delete_pushed: bool, device: str
    ) -> None:
        """KizamiError "bad_option" for what does not go together."""
        foreign = engine != "kizami"
        for name, is_asked in {"engine": foreign, "device": device != "cpu"}.items():
            if is_asked and self.max_memory is not None:
                given, theirs = o.spelled(context, "max_memory"), o.spelled(context, name)
                takes = "the whole model" if name == "engine" else "a driver, which takes what it likes,"
                raise KizamiError(
                    f"{given} with {theirs}, which has {takes} in memory",
                    code="bad_option",
                    hint="leave one of them out",
                )
        if self.shards is not None:
            alone = {"executor": self.executor == "ray", "engine": foreign, "push_to": push_to is not None}
            self._refuse(context, "shards", alone)
        if self.executor == "ray":
            self._refuse(
                context, "executor", {"engine": foreign, "delete_pushed": delete_pushed, "device": device != "cpu"}
            )
        elif o.from_command_line(context, "ray_address"):
            raise KizamiError("--ray-address is for --executor ray", code="bad_option", hint="add --executor ray")

    def _refuse(self, context: typer.Context, ours: str, asked: dict[str, bool]) -> None:
        for name in (name for name, is_asked in asked.items() if is_asked):
            raise KizamiError(
                f"{o.spelled(context, ours)} with {o.spelled(context, name)}, which one process does alone",
                code="bad_option",
                hint="kizami push OUT REPO pushes what is finished" if "push" in name else "leave one of them out",
            )
