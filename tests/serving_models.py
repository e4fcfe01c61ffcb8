"""Servers of published models, made from their configs alone, and a checkpoint folder of one tensor per config."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import inventory
import make_cases

from kizami.formats.families import Family, find_family
from kizami.formats.serving.gpus import GPUS
from kizami.formats.serving.model import ServedModel, read_model
from kizami.formats.serving.server import Server
from kizami.formats.serving.stored import StoredForm

FP8 = StoredForm("fp8", (), (128, 128), False, False, False)
MISSING = object()  # a key to leave out
INT4 = StoredForm("compressed-tensors", (32,), None, True, False, False)
MIXED = replace(INT4, int4_on_linear=False)


def family_of(config: dict[str, Any]) -> Family:
    text = config.get("text_config", config)
    mtp = range(text["num_nextn_predict_layers"]) if text.get("num_nextn_predict_layers") else ()
    names = [f"model.layers.{text['num_hidden_layers'] + i}.eh_proj.weight" for i in mtp]
    return find_family(config, ["model.layers.0.mlp.experts.0.up_proj.weight", *names])[0]


def model_of(name: str, **changes: object) -> ServedModel:
    config = inventory.config(name) | changes
    return read_model(config, family_of(config))


def server_of(name: str, stored: StoredForm = INT4, gpu: str = "h200", **options: Any) -> Server:
    made = Server("sglang", "single", "M", model_of(name), stored, GPUS[gpu])
    return replace(made, **options)


def pair_of(name: str, **options: Any) -> tuple[Server, Server]:
    """FP8 prefill and INT4 decode."""
    decode = server_of(name, role="decode", path="D", **options)
    return replace(decode, role="prefill", path="P", stored=FP8), decode


def save(folder: Path, name: str, **changes: object) -> Path:
    """The config of a published model beside two tensors: enough for everything but weights."""
    config = inventory.config(name) | changes
    tensors = {
        "model.norm.weight": make_cases.bf([1.0] * 8),
        "model.layers.0.mlp.experts.0.up_proj.weight": make_cases.bf([[1.0] * 8] * 8),
    }
    kept = {key: value for key, value in config.items() if value is not MISSING}
    return make_cases.Checkpoint(config=kept, shards={"model.safetensors": tensors}).save(folder)
