"""All ranks drop the same requests: one all-reduce of the abort flags, before anybody acts on them.

Under tensor parallelism each rank has its own copy of a request's table and its own pages. If one rank drops a request
and another does not, their batches differ from the next collective on, and the group hangs. SGLang's checksum at PD
hand-over agrees in the same way. vLLM needs none of this for tags: its one scheduler decides for all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist

from kizami.formats.errors import KizamiError


def agree(abort: torch.Tensor, group: Any = None) -> torch.Tensor:
    """bool [R], True where any rank of `group` (None: all) says so: abort those. Without torch.distributed, `abort`.

    Every rank of `group` must call it at every check, with nothing to report too, and with the same requests in the
    same order: another number of them on one rank is not found everywhere (gloo may give an answer, or abort). On a
    GPU it waits for nothing. Where a rank has died or stays away, no answer exists: torch raises RuntimeError on the
    others, gloo at once if the connection closed and else after the group's timeout (`init_process_group(timeout=)`,
    minutes by default); NCCL, by its documentation, ends the process after its own. Let it end the step: to go
    on alone with flags that were not agreed on is how batches come apart.
    """
    if abort.dtype != torch.bool:
        raise KizamiError(f"abort flags are {abort.dtype}, expected torch.bool", code="page_tags")
    if not (dist.is_available() and dist.is_initialized()):
        return abort
    if dist.get_rank(group) < 0:
        raise KizamiError("this rank is not in the group that is to agree", code="page_tags")
    flags = abort.to(torch.int32)  # gloo and NCCL both reduce it
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags > 0
