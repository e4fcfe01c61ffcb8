"""The output read as a reader reads it, by the config: whether each weight has what the config says it has."""

from collections.abc import Iterator

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.config_figures import wrong_figures
from kizami.formats.dialects import find_encoded_weights
from kizami.formats.errors import KizamiError, printable
from kizami.formats.foreign import quantization_configs
from kizami.quantize.manifest import CONFIG
from kizami.quantize.settings import Policy
from kizami.quantize.verification.files import Problem


def check_config(checkpoint: Checkpoint, policy: Policy) -> Iterator[Problem]:
    """Group and block sizes, scales that are missing or left alone, and everything else that the config says in
    numbers. The other layouts' configs have few of them, and `method_resolver` holds those."""
    stated = quantization_configs(checkpoint.config)
    if policy.format != "pack-quantized" or not stated:
        return
    try:
        found = find_encoded_weights(checkpoint.config, checkpoint.tensors)
    except KizamiError as e:
        yield Problem(e.code, e.message, e.file, e.tensor)
        return
    examples = {"int4": next(iter(found.packed), None), "fp8": next(iter(found.weights), None)}
    for where, value, expected, form in wrong_figures(stated[0][1], policy.group_size, bool(found.packed)):
        message = f"{where} is {printable(repr(value), 80)}, expected {expected!r}"
        yield Problem("config_figures", message, CONFIG, examples[form])
