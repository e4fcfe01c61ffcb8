"""What `kizami check` says of a server's checkpoint, as findings about its launch."""

import shlex

from kizami.formats.engines.check import find_problems
from kizami.formats.engines.served import Served
from kizami.formats.serving.foretell import Finding
from kizami.formats.serving.server import Server

# What the launch's own flags answer.
_ANSWERED = frozenset({"shared_experts_fusion", "gptq"})


def about_loading(server: Server, served: Served) -> list[Finding]:
    """One finding for all errors, and the warnings that no printed flag answers; notes are left to `check`."""
    found = find_problems(served, server.engine, tp=server.tp, ep=server.ep)
    errors = [one for one in found if one.severity == "error"]
    made = [
        Finding("warning", one.code, server.role, one.message, one.source, one.advice)
        for one in found
        if one.severity == "warning" and one.code not in _ANSWERED
    ]
    if errors:
        at = f" ({errors[0].module})" if errors[0].module else ""
        words = f"kizami check {shlex.quote(server.path)} --engine {server.engine} --tp {server.tp} --ep {server.ep}"
        message = f"does not load as meant: {errors[0].message}{at}"
        advice = (
            f"{errors[0].advice}; `{words}` lists all {len(errors)} errors" if len(errors) > 1 else errors[0].advice
        )
        made.append(Finding("error", "does_not_load", server.role, message, errors[0].source, advice))
    return made
