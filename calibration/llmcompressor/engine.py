"""llm-compressor's GPTQ and AWQ on the same calibration tokens, for models that fit in memory.

What it packs is kizami's plan, and what it answers is written by kizami's writer: two methods can then be compared with
nothing else between them. llm-compressor runs with its own defaults (GPTQ: static activation order, damping 0.01,
block size 128; AWQ: duo scaling, 20 grid points; scales by max |W| / 7.5, every expert calibrated with every token).

AWQ divides the weights of one module by a factor per channel and multiplies those of the next. llm-compressor's lists
for these families also do that from the norm before the experts, which would change the norm, the shared experts and
the router, tensors that the plan passes on as they are (and for glm_moe_dsa and Glm4MoeLite its lists leave the router
out: routing then moves). Here only up_proj -> down_proj is done: inside one expert, exact in its effect, and nothing
outside of it changes.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.utils import get_direct_state_dict, patch_attr
from llmcompressor import oneshot
from llmcompressor.core import reset_session
from llmcompressor.logger import LoggerConfig, configure_logger, logger
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kizami.calibration.llmcompressor.limits import EngineMethod, Shape
from kizami.calibration.llmcompressor.model import dense_model
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.int4_layout import WEIGHT_PACKED, WEIGHT_SCALE, packed_specs
from kizami.formats.tensors import TensorSpec
from kizami.formats.writer import ShardWriter, WrittenShard

EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
METRIC_LEVEL = 38  # llmcompressor/logger.py
UP, DOWN = "up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What was written; rounded: modules that GPTQ rounded to nearest, as their Hessian had no inverse."""

    file: WrittenShard
    rounded: tuple[str, ...]


def run_engine(
    checkpoint: Checkpoint,
    targets: Mapping[str, Shape],
    method: EngineMethod,
    group_size: int,
    ids: NDArray[np.int32],
    out: Path,
    *,
    talk: bool = False,
) -> EngineRun:
    """Packs `targets` (module -> [N, K], names of the checkpoint) and writes their codes and scales to the file `out`.

    ids: tokens [sequences, seq_len], calibration sequences only. out: `X.weight_packed` I32 [N, K/8] and
    `X.weight_scale` BF16 [N, K/g] of each target, in their order; whole or absent. talk: progress bars on stderr.
    KizamiError "model_mismatch", "unsupported_model", "bad_option" for an expert of which AWQ could change one half.
    """
    if method == "awq":
        _check_pairs(targets)
    with ExitStack() as stack:
        if not talk:
            stack.enter_context(redirect_stderr(StringIO()))  # progress bars; errors are exceptions
        stack.enter_context(redirect_stdout(StringIO()))  # stdout is data, and the engine logs there
        _quiet()
        torch.manual_seed(0)
        model, prefix = dense_model(checkpoint)
        _check_length(model, ids)
        names = {module.removeprefix(prefix): module for module in targets}
        recipe = _recipe(method, group_size, _selectors(model, names))
        _oneshot(model, recipe, ids)
    rounded = getattr(recipe[0], "_rtn_fallback_module_names", [])
    return EngineRun(_save(model, names, targets, group_size, out), tuple(names[name] for name in rounded))


def _quiet() -> None:
    """No handler, where llm-compressor's would write to stdout. Switched off altogether, GPTQ of 0.14.0.1 stops at the
    first module: it logs at a level of its own, which is then never defined."""
    configure_logger(LoggerConfig(console_log_level=None))
    try:
        logger.level("METRIC")
    except ValueError:
        logger.level("METRIC", no=METRIC_LEVEL)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # warns of tracing, which works


def _check_pairs(targets: Mapping[str, Shape]) -> None:
    for module in targets:
        stem, _, leaf = module.rpartition(".")
        other = {UP: DOWN, DOWN: UP}.get(leaf)
        if other is not None and f"{stem}.{other}" not in targets:
            raise KizamiError(
                f"{module} becomes INT4 and {stem}.{other} does not, and AWQ changes both",
                code="bad_option",
                hint="--ignore or --targets must name whole experts",
            )


def _check_length(model: PreTrainedModel, ids: NDArray[np.int32]) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if isinstance(longest, int) and ids.shape[1] > longest:
        raise KizamiError(
            f"sequences of {ids.shape[1]} tokens, and the model takes at most {longest} (max_position_embeddings)",
            code="bad_token",
            hint="use a smaller --seq-len",
        )


def _selectors(model: PreTrainedModel, names: Mapping[str, str]) -> list[str]:
    """One pattern where it says the same: of exact names each module is held against each."""
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if unknown := sorted(names.keys() - linears):
        raise KizamiError(
            f"is to be packed, and {type(model).__name__} has no such linear",
            code="model_mismatch",
            tensor=names[unknown[0]],
            hint="--ignore leaves it out",
        )
    matched = {name for name in linears if re.match(EXPERTS.removeprefix("re:"), name)}
    return [EXPERTS] if matched == names.keys() else sorted(names)


def _recipe(method: EngineMethod, group_size: int, selectors: list[str]) -> list[Modifier]:
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size)
    groups = {"group_0": QuantizationScheme(targets=selectors, weights=weights)}
    if method == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=[])]
    mapping = AWQMapping(rf"re:.*\.{UP}$", [rf"re:.*\.{DOWN}$"])
    return [AWQModifier(mappings=[mapping]), QuantizationModifier(config_groups=groups, ignore=[])]


def _oneshot(model: PreTrainedModel, recipe: list[Modifier], ids: NDArray[np.int32]) -> None:
    rows = [torch.from_numpy(row.astype(np.int64)) for row in ids]
    samples: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    with TemporaryDirectory(prefix="kizami-") as folder, _without_accelerator():
        # oneshot looks for a quantization_config at the model's path; without a path it would ask the Hub.
        model.config.save_pretrained(folder)
        model.config._name_or_path = folder
        try:
            oneshot(
                model=model,
                processor=PreTrainedTokenizerBase(),  # required beside a dataset, and not used for one of tokens
                dataset=torch.utils.data.DataLoader(samples, batch_size=1),
                recipe=recipe,
            )
        finally:
            reset_session()  # it keeps the model


@contextmanager
def _without_accelerator() -> Iterator[None]:
    """AWQ of 0.14.0.1 pins its samples' memory for copies to an accelerator, and stops where there is none."""
    if torch.accelerator.is_available():
        yield
        return
    with patch_attr(IntermediatesCache, "pin_memory", lambda *_: None):
        yield


def _save(
    model: PreTrainedModel, names: Mapping[str, str], targets: Mapping[str, Shape], group_size: int, out: Path
) -> WrittenShard:
    """Module by module: the packed model is never in memory beside the other."""
    specs = [spec for module, shape in targets.items() for spec in given_specs(module, shape, group_size)]
    ours = {module: name for name, module in names.items()}
    with ShardWriter(out, specs) as writer:
        for module, shape in targets.items():
            linear = model.get_submodule(ours[module])
            state = PackedQuantizationCompressor.compress(get_direct_state_dict(linear), linear.quantization_scheme)
            packed, scale = (state[leaf].detach().cpu().contiguous() for leaf in (WEIGHT_PACKED, WEIGHT_SCALE))
            arrays = (packed.numpy(), scale.view(torch.uint16).numpy())
            for spec, array in zip(given_specs(module, shape, group_size), arrays, strict=True):
                assert array.shape == spec.shape, (spec, array.shape)
                writer.append(spec.name, array)
        return writer.finish()


def given_specs(module: str, shape: Shape, group_size: int) -> Sequence[TensorSpec]:
    """What the file holds of a module, as quantize/given.py reads it."""
    packed, _, scale = packed_specs(module, *shape, group_size)
    return packed, scale
