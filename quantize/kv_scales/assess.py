"""The KV scales of a checkpoint, and all that is known of its cache's range."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError, printable
from kizami.formats.families import find_family
from kizami.formats.fingerprint import config_sha256, sample_contents
from kizami.formats.foreign import bad_config
from kizami.formats.kv_scales.neutral import MAX_HEADS, Granularity, KvScales
from kizami.formats.kv_scales.tensors import find_prefix
from kizami.formats.serving.model import ServedModel, compared_type, read_model
from kizami.formats.statistics import KvRange, Statistics
from kizami.quantize.calibrated.statistics import check_source
from kizami.quantize.kv_scales.choose import LayerChoice, choose_layer
from kizami.quantize.kv_scales.merge import check_scales
from kizami.quantize.kv_scales.read_source import LayerSource, read_layers


@dataclass(frozen=True, slots=True)
class Assessment:
    """layers: of the model. mtp: bounds of next-token layers, which no file has scales for. prefix: what stands before
    a layer's number in the tensors' names. stats_sha256: of the STATS that the layers were held to."""

    model: ServedModel
    scales: KvScales
    layers: tuple[LayerChoice, ...]
    mtp: tuple[LayerSource, ...]
    prefix: str
    stats_sha256: str | None

    @property
    def clips(self) -> bool:
        """Whether values were measured that engines will clip."""
        return any(layer.clips for layer in self.layers)


def assess(
    checkpoint: Checkpoint, statistics: Statistics | None, granularity: Granularity, given: KvScales | None = None
) -> Assessment:
    """given: scales that are already chosen, to be held to what is known; `granularity` is theirs then.

    KizamiError "stats_mismatch" for STATS of another checkpoint, "kv_scales_mismatch" for scales of another,
    "bad_option" for scales per head of a latent, "bad_config", "bad_kv_scale", and those of read_layers.
    """
    family, _ = find_family(checkpoint.config, checkpoint.tensors)
    model = read_model(checkpoint.config, family)
    if given is not None:
        check_scales(checkpoint, family, given)
        granularity = given.granularity
    _check_model(model, granularity)
    if statistics is not None:
        check_source(statistics, checkpoint, sample_contents(checkpoint))
        _check_layers(statistics, model)
    sources = read_layers(checkpoint, family, model)
    layers = tuple(
        choose_layer(
            source,
            _ranges(statistics, source.layer),
            model,
            granularity,
            None if given is None else given.layers[source.layer],
        )
        for source in sources
        if not source.in_mtp
    )
    stats_sha256 = None if statistics is None else statistics.sha256
    scales = given or KvScales(
        model_type=compared_type(family),
        architecture=model.architecture,
        attention=model.attention.value,
        kv_heads=model.kv_heads,
        granularity=granularity,
        config_sha256=config_sha256(checkpoint),
        statistics_sha256=stats_sha256,
        layers=(),
    )
    scales = replace(scales, layers=tuple(layer.scales for layer in layers))
    mtp = tuple(source for source in sources if source.in_mtp)
    return Assessment(model, scales, layers, mtp, find_prefix(checkpoint.tensors), stats_sha256)


def check_claims(checkpoint: Checkpoint, scales: KvScales) -> None:
    """A certificate is only as good as the weights that it was made from, and a config alone does not tell whose they
    are. KizamiError "kv_scales_mismatch" for a layer that `scales` call certified and these weights do not."""
    if all(layer.source != "certificate" for layer in scales.layers):
        return
    for layer in assess(checkpoint, None, scales.granularity, scales).layers:
        claimed = scales.layers[layer.scales.layer].source
        if claimed == "certificate" and layer.scales.source != "certificate":
            why = "; ".join(f"{bound.what} {bound.says}" for bound in layer.bounds if not bound.proves)
            raise KizamiError(
                f"layer {layer.scales.layer} is said to be certified, and these weights give no certificate: "
                f"{why or 'its scales are not 1.0, or the weights lie below what scale 1.0 keeps'}",
                code="kv_scales_mismatch",
                hint="make them with kizami kv-scales SRC, of this source",
            )


def _check_model(model: ServedModel, granularity: Granularity) -> None:
    if model.kv_heads > MAX_HEADS:
        raise bad_config("num_key_value_heads", model.kv_heads, f"at most {MAX_HEADS}")
    if len(model.architecture) > 200 or not model.architecture:
        raise bad_config("architectures", model.architecture, "a list with the name of the model's class")
    if model.is_mla and granularity == "attn_head":
        raise KizamiError(
            f"{printable(model.architecture, 60)} caches one latent for all heads; there is no scale per KV head",
            code="bad_option",
            hint="leave --per-head out",
        )


def _check_layers(statistics: Statistics, model: ServedModel) -> None:
    missing = sorted(set(range(model.layers)) - set(statistics.layers))
    if missing:
        raise KizamiError(
            f"STATS lacks layer {missing[0]} ({len(missing)} of {model.layers} in all)",
            code="stats_mismatch",
            hint="run kizami calibrate on this checkpoint",
        )


def _ranges(statistics: Statistics | None, layer: int) -> Mapping[str, KvRange] | None:
    return None if statistics is None else statistics.layer(layer).kv
