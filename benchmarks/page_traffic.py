"""What page_simulator.py is about: the load on it, requests, writes, and what a mode may do."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Held = tuple[int, int, int]  # a page as its holder knows it: id, tag (the bits of a u32 as an int32), lease


@dataclass(frozen=True, slots=True)
class Load:
    """The pool and its traffic; all in tokens, pages and steps. Page 0 is padding and belongs to nobody."""

    pages: int = 80  # too few for all rows at once: some requests are preempted
    page: int = 8
    rows: int = 16
    width: int = 12  # pages of the longest request
    prompt: tuple[int, int] = (8, 48)
    output: tuple[int, int] = (8, 48)
    families: int = 3  # system prompts, which nine of ten requests share the beginning of
    remote: float = 0.4  # prefilled elsewhere
    transfer: tuple[int, int] = (1, 6)  # steps until a page lands
    left: float = 0.002  # a client goes away, per request and step
    arrivals: float = 0.6  # a step


@dataclass(slots=True)
class Writes:
    """Tokens on their way into pages, one per entry, with what a writer can know: the tag it was given and who it is.
    `lease` is for the ledger. `counted`: the scheduler waits for them before it frees the page."""

    page: Ints
    slot: Ints
    value: Ints
    tag: Ints
    owner: Ints
    lease: Ints
    counted: bool = True


@dataclass(slots=True)
class Request:
    """`expected`: the numbers of all its tokens; `prompt`: how many of them are computed before the first step."""

    number: int
    expected: Ints
    prompt: int
    held: list[Held] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """What happened. victims: requests that read wrong bytes; aborted: by a check; false: of these, with all in
    order; refused: releases and prefix hits that the guard turned down."""

    events: Counter[str] = field(default_factory=Counter)
    victims: dict[int, int] = field(default_factory=dict)  # request -> step
    aborted: dict[int, int] = field(default_factory=dict)
    false: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
