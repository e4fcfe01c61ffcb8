"""`kizami evaluate A B` of checkpoints: what is read, run and compared."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kizami.cli import calibrate_options as c
from kizami.cli.calibrate import refuse_missing_packages, refusing_out_of_memory
from kizami.cli.output import Ui
from kizami.cli.stop import STOP
from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from kizami.calibration.data.tokens import TokenSet
    from kizami.calibration.evaluation.streamed import Candidate
    from kizami.calibration.kv_accuracy.variants import Variant
    from kizami.formats.checkpoint import Checkpoint

LONG = 2048
BUILT_IN = (
    "no --data: this is the small sample that comes with kizami, on which kizami calibrate without --data also runs; "
    "data of the kind that the model will see, and that nothing was calibrated on, is better"
)


@dataclass(frozen=True, slots=True)
class Machine:
    """max_memory: as the user wrote it; memory: bytes."""

    scratch: Path | None
    max_memory: str
    memory: int
    device: c.DeviceName
    dtype: Literal["float32", "bfloat16"] | None
    threads: int | None


@dataclass(frozen=True, slots=True)
class Caches:
    """FP8 caches that every B is evaluated with, beside BF16."""

    layouts: list[str] | None
    files: list[Path] | None


@dataclass(frozen=True, slots=True)
class Texts:
    """data: None for the sample that comes with kizami."""

    data: list[Path] | None
    tokenizer: str | None
    samples: int
    seq_len: int | None
    seed: int


def on_text(
    ui: Ui, a: str, others: list[str], caches: Caches, texts: Texts, machine: Machine, *, control: bool
) -> dict[str, Any]:
    """The body of --json, without thresholds. KizamiError as evaluate_streamed, "missing_package", "out_of_memory"."""
    refuse_missing_packages()
    with refusing_out_of_memory(machine.max_memory, resumes=False):
        models = _open_models(a, others, caches, control=control)
        sets, twice = _read_sets(ui, models[0].checkpoint, texts)
        body = _compared(ui, models, sets, machine, caches)
    body["tokens"]["repeated"] = list(twice)
    body["warnings"] += [f"{path} has the bytes of {kept}: it is used once" for path, kept in twice.items()]
    if texts.data is None:
        body["tokens"]["built_in"] = True
        body["warnings"].append(BUILT_IN)
    body["warnings"] += _other_tokenizers(models)
    return body


def _open_models(a: str, others: list[str], caches: Caches, *, control: bool) -> list["Candidate"]:
    """A first, then every B, each with the caches that are asked for; A once more as a control."""
    from kizami.cli.source import open_source
    from kizami.formats.card_evaluation import CONTROL

    with STOP.held():
        from kizami.calibration.evaluation.streamed import Candidate

    first = open_source(a)
    opened = [(other, open_source(other)) for other in others]
    made = [Candidate(a, first)]
    made += [Candidate(name, one, _variants(one, caches)) for name, one in opened]
    return made + ([Candidate(CONTROL, first)] if control else [])


def _variants(checkpoint: "Checkpoint", caches: Caches) -> tuple["Variant", ...]:
    """The layouts, then one for each file. Paths of files of one name are not cut short: they tell two apart."""
    from kizami.cli.kv_accuracy import read_variants, scaled_variant
    from kizami.formats.families import find_family
    from kizami.formats.serving.model import read_model
    from kizami.quantize.kv_scales.scale_file import read_kv_scales

    if caches.layouts is None and caches.files is None:
        return ()
    served = read_model(checkpoint.config, find_family(checkpoint.config, checkpoint.tensors)[0])
    files = [*dict.fromkeys(caches.files or ())]
    names = [file.name for file in files]
    shown = [
        printable(name if names.count(name) == 1 else str(file), 4096) for name, file in zip(names, files, strict=True)
    ]
    scaled = [scaled_variant(name, read_kv_scales(file, checkpoint)) for name, file in zip(shown, files, strict=True)]
    return (*read_variants(checkpoint, served, caches.layouts or [], None), *scaled)


def _read_sets(ui: Ui, checkpoint: "Checkpoint", texts: Texts) -> tuple[list[tuple[str, "TokenSet"]], dict[str, str]]:
    """A set of tokens for each file, which is a domain; and those with the bytes of an earlier one, with its name."""
    from kizami.cli.calibrate import vocabulary_of
    from kizami.formats.families import find_family
    from kizami.formats.hub.cache import locate
    from kizami.formats.serving.model import read_model

    ui.progress("reading the data")
    with STOP.held():
        from kizami.calibration.data.tokenizer import Tokenizer
        from kizami.calibration.data.tokens import TokenSet, TokenSettings, read_tokens, sample_files

    served = read_model(checkpoint.config, find_family(checkpoint.config, checkpoint.tensors)[0])
    opened = Tokenizer.open(checkpoint.root if texts.tokenizer is None else locate(texts.tokenizer))
    settings = TokenSettings(texts.samples, texts.seq_len or min(LONG, served.context or LONG), texts.seed)
    paths = texts.data or sample_files(opened)
    names = [path.name for path in paths]
    vocabulary = vocabulary_of(checkpoint)
    twice = {}
    sets: dict[str, tuple[str, TokenSet]] = {}  # by the file's hash: twice the same would count twice
    for name, path in zip(names, paths, strict=True):
        tokens = read_tokens([path], opened, settings, vocabulary)
        kept = sets.setdefault(tokens.sources[0].sha256, (name if names.count(name) == 1 else str(path), tokens))
        if kept[1] is not tokens:
            twice[str(path)] = kept[0]
    return list(sets.values()), twice


def _compared(
    ui: Ui, models: list["Candidate"], sets: list[tuple[str, "TokenSet"]], machine: Machine, caches: Caches
) -> dict[str, Any]:
    from kizami.cli.evaluate_text import Watch, text_body
    from kizami.quantize.threads import available_cores

    with STOP.held():
        from kizami.calibration.evaluation.streamed import Options, evaluate_streamed, join_texts
        from kizami.calibration.forward.settings import Settings
        from kizami.calibration.machine import use_threads

        use_threads(machine.threads or available_cores())
    STOP.say = lambda: "interrupted; nothing is left on the disk, and the same command starts over"
    joined = join_texts(sets)
    settings = Settings("none", machine.device, machine.dtype, machine.memory)
    found = evaluate_streamed(models[0], models[1:], joined, Options(machine.scratch, settings), Watch(ui))
    facts = [more for one in models[1:] for more in _facts(one, caches)]
    return text_body(models[0].name, sets, joined, found, facts)


def _facts(candidate: "Candidate", caches: Caches) -> list[dict[str, Any]]:
    """Of each of its names, from which it is not to be told: a folder may have `, KV ` in its own."""
    files = iter(dict.fromkeys(caches.files or ()))
    common: dict[str, Any] = {"model": candidate.name, "identity": _identity(candidate.checkpoint)}
    of_caches: list[dict[str, Any]] = [
        {"cache": one.name, "scales": None if one.scales is None else str(next(files))} for one in candidate.variants
    ]
    return [common | more for more in ({"cache": None, "scales": None}, *of_caches)]


def _identity(checkpoint: "Checkpoint") -> dict[str, str | None]:
    """Which checkpoint the figures are of; plan_hash and shards_sha256: of an output of kizami."""
    from kizami.formats.fingerprint import config_sha256
    from kizami.quantize.manifest import output_identity, read_manifest

    try:
        ours: dict[str, str | None] = {**output_identity(read_manifest(checkpoint.root))}
    except KizamiError:
        ours = {"plan_hash": None, "shards_sha256": None}
    return {"config_sha256": config_sha256(checkpoint), **ours}


def _other_tokenizers(models: list["Candidate"]) -> list[str]:
    """Models on the same ids are compared as if these meant the same to both."""
    first, *others = models
    ours = _tokenizer_bytes(first.checkpoint.root)
    return [
        f"{other.name} has another tokenizer than {first.name}, and was run on the ids of the latter's"
        for other in others
        if (theirs := _tokenizer_bytes(other.checkpoint.root)) is not None and ours is not None and theirs != ours
    ]


def _tokenizer_bytes(root: Path) -> str | None:
    from kizami.formats.files import file_sha256

    for name in ("tokenizer.json", "tiktoken.model"):
        if (root / name).is_file():
            return file_sha256(root / name, name)
    return None
