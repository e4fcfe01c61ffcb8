"""Every run of make_cases.py through the command line: faults that converters really had, and the right answer."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import case_checks
import make_cases
import numpy as np
import pytest
from case_checks import Ran, run_check
from case_runner import (
    FILE_LIMIT,
    KILL_AFTER,
    Said,
    assert_converted,
    assert_mentions,
    assert_refused,
    error_object,
    in_a_process,
    kizami,
    measure,
)
from cli_fixtures import files_of
from gptq_fixtures import Layer, make_stats
from local_hub import LocalHub
from local_hub_faults import Fault
from make_cases import shard_name
from output_oracle import Folder, contents, parse_json
from test_hub_jobs import run as in_its_own

RUNS: dict[int, tuple[str, ...]] = {
    1: ("moved",),
    2: ("default", "experts 0-2 kept dense"),
    3: ("dense", "int4"),
    4: ("e8m0",),
    5: ("dense", "int4"),
    6: ("a: 0x80 is -0.0", "b: fnuz dtype"),
    7: ("e5m2",),
    8: ("weight_scale_inv", "weight_scale", "scale", "both"),
    9: ("a: []", "b: [1]", "c: [256,1]", "d: [256,1] against [128,128]"),
    10: ("bias",),
    11: ("extra tensors",),
    12: ("known words",),
    13: ("zero groups",),
    14: ("g=128", "g=32"),
    15: ("tp 8", "tp 3", "tp 2"),
    16: ("default", "forced"),
    17: ("g=64", "unknown option"),
    18: ("minmax", "default method"),
    19: ("weighted", "gptq"),
    20: ("default", "rest fp8"),
    21: ("rules",),
    22: ("layer 2", "mtp.0 names"),
    23: ("prefix",),
    24: ("glm_moe_dsa", "deepseek_v32"),
    25: ("split pair",),
    26: ("a: w1/w3/w2", "b: nothing matches"),
    27: ("a: no lm_head", "b: identical lm_head"),
    28: ("config",),
    29: ("small shards",),
    30: ("consolidated", "renamed shards"),
    31: ("missing", "empty", "null"),
    32: ("side files",),
    33: ("auto_map",),
    34: ("truncated",),
    35: ("full disk",),
    36: ("resume",),
    37: ("sparse",),
    38: ("good", "dangling"),
    39: ("reused folder",),
    40: ("a: 2^64-1", "b: 10^11", "c: 0", "d: 200 MiB"),
    41: ("a", "b", "c", "d", "e: shard is a symlink to the outside"),
    42: ("zero", "one"),
    43: ("checkpoint", "sglang json, tp 1", "sglang json, tp 2"),
    44: ("push",),
    45: ("dense", "int4"),
    46: ("100 KB",),
    47: ("num_experts", "num_local_experts", "removed"),
    48: ("1-of-12",),
}
SLOW, LONG = {35, 36, 48}, {37, 44}


# ---------------------------------------------------------------- running


class Cases:
    """All cases on disk, and finished conversions that several runs compare with."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with contextlib.redirect_stdout(io.StringIO()):
            make_cases.build(root, sorted(make_cases.CASES))
        self.of = {number: json.loads((self.folder(number) / "case.json").read_text()) for number in make_cases.CASES}
        self._converted: dict[tuple[Path, tuple[str, ...]], Folder] = {}

    def folder(self, number: int) -> Path:
        return self.root / f"case-{number:02d}"

    def convert(self, source: Path, options: tuple[str, ...]) -> Folder:
        key = (source, options)
        if key not in self._converted:
            out = self.root / f"converted-{len(self._converted)}"
            said = kizami("convert", source, out, *options)
            assert said.code == 0, said
            self._converted[key] = Folder(out)
        return self._converted[key]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    root = tmp_path_factory.mktemp("cases")
    yield Cases(root)
    shutil.rmtree(root)


class Run:
    """One run of a case, its OUT in a fresh folder."""

    def __init__(self, cases: Cases, number: int, name: str, folder: Path) -> None:
        self.cases, self.number, self.name = cases, number, name
        self.case = cases.folder(number)
        [self.facts] = [run for run in cases.of[number]["runs"] if run["name"] == name]
        self.source = Path(os.path.normpath(self.case / self.facts["input"]))
        self.out = folder / "out"
        self.partial = folder / "out.partial"
        self.mentions: list[str] = self.facts.get("error", {}).get("mentions", [])
        self.may_refuse = self.facts["expectation"] == "error" or self.facts["error_also_allowed"]
        self.may_succeed = self.facts["expectation"] == "ok"
        self.untouched = contents(self.source), contents(self.case)

    @property
    def command(self) -> list[str]:
        placeholders = {"{input}": str(self.source), "{out}": str(self.out), "{stats}": f"{self.out}-STATS"}
        words = [placeholders.get(word, word) for word in self.facts["command"]]
        return [str(self.case / word) if word.endswith(".safetensors") else word for word in words]

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(self.command[3:])

    def convert_alike(self, source: Path, *, same_shards: bool) -> Folder:
        options = list(self.options)
        if not same_shards and "--max-shard-size" in options:
            at = options.index("--max-shard-size")
            del options[at : at + 2]
        return self.cases.convert(Path(os.path.normpath(source)), tuple(options))

    def assert_right(self, said: Said) -> None:
        if said.code == 2 and self.may_refuse:
            self.assert_refusal(said)
        else:
            assert self.may_succeed, f"exit {said.code}, expected a refusal\n{said.stderr}"
            self.assert_success(said)
        assert (contents(self.source), contents(self.case)) == self.untouched, "the source was touched"

    def assert_refusal(self, said: Said) -> None:
        """Exit code 2, one line that says it all, the same as an object, and nothing left that looks finished."""
        assert_refused(said, self.mentions)
        assert not self.out.exists()
        assert not [*self.partial.rglob("*.safetensors")], "a shard was written before the refusal"
        as_json = kizami(*self.command, "--json")
        assert as_json.code == 2
        error = error_object(as_json)
        assert_mentions(" ".join(str(value) for value in error.values()), self.mentions)
        assert not self.out.exists()

    def assert_success(self, said: Said) -> None:
        out = assert_converted(said, self.source, self.out)
        ran = Ran(out, Folder(self.source), said.stdout, said.stderr, self.case, self.convert_alike)
        for facts in self.facts.get("checks", ()):
            if facts["check"] != "peak_rss_over_baseline_mib_at_most":  # needs a process of its own: case 37
                run_check(ran, facts)


# ---------------------------------------------------------------- what some cases do around the command


def plainly(run: Run) -> None:
    run.assert_right(kizami(*run.command))


def plan_for_ranks(run: Run) -> None:
    """Case 15 by `kizami plan`, as long as there is no `kizami check`."""
    tp = run.facts["command"][-1]
    said = kizami("plan", run.source, "--group-size", "64", "--tp", tp)
    assert said.code == (0 if run.facts["expectation"] == "ok" else 1)
    assert_mentions(said.stderr, run.mentions)
    found = parse_json(kizami("plan", run.source, "--group-size", "64", "--tp", tp, "--json").stdout)
    named = {finding["module"] for finding in found["tensor_parallel"]["findings"]}
    assert named == ({make_cases.DOWN} if run.mentions else set())


def with_statistics(run: Run) -> None:
    """Case 19: the STATS that its content describes. Every token that comes to expert 0 is the same, so that what goes
    into its gate and its down is of rank 1."""
    content = json.loads((run.case / "stats-content.json").read_text())
    [counts] = content["token_counts"].values()
    fit = sum(counts) // 2
    pairs = [(0, 1)] * 30 + [(0, 2)] * 70 + [(1, 2)] * 50 + [(0, 1)] * 50  # the last are held out

    def singular(layer: int, data: Layer) -> None:
        if layer == 1:
            data.experts[:], data.held_out[:] = pairs, np.arange(len(pairs)) >= fit
            data.x[(data.experts == 0).any(axis=1)] = data.x[0]

    made = make_stats(run.source, run.out.with_name("out-STATS"), tokens=len(pairs), sequence=50, change=singular)
    assert [len(made.layers[1].of(expert, held_out=False)[0]) for expert in range(4)] == counts
    for module in content["hessians"]:
        assert np.linalg.matrix_rank(made.input_of(module, held_out=False)[0]) == 1
    plainly(run)


def disk_full(run: Run) -> None:
    """Case 35 with a limit on the size of files, which meets a writer in the same place: EFBIG for ENOSPC."""
    done = in_a_process(FILE_LIMIT, 1 << 20, *run.command)
    assert_refused(Said(done.returncode, done.stdout, done.stderr), ["File too large", shard_name(1, 1)])
    assert not run.out.exists()
    assert not [p for p in run.partial.rglob("*") if p.suffix in (".safetensors", ".tmp")]
    assert kizami(*run.command).code == 0
    assert contents(run.out) == contents(run.convert_alike(run.source, same_shards=True).root)


def kill_and_resume(run: Run, shards: int, *more: str) -> None:
    command = [*run.command, *more]
    done = in_a_process(KILL_AFTER, shards, *command)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not run.out.exists()
    assert len([*run.partial.glob("model-*.safetensors")]) >= shards
    said = kizami(*command)
    assert said.code == 0, said.stderr
    assert f"resumed: {shards} of" in said.stderr
    clean = run.cases.convert(run.source, (*run.options, *more))
    assert contents(run.out) == contents(clean.root)


def killed_after_the_first_shard(run: Run) -> None:
    kill_and_resume(run, 1)
    run.assert_success(Said(0, "", ""))


def killed_after_the_third_shard(run: Run) -> None:
    plainly(run)
    shutil.rmtree(run.out)
    kill_and_resume(run, 3, "--max-shard-size", "400KB")


def uploads_that_fail_half_way(run: Run) -> None:
    """Some 30 small shards; 429 twice, 504, a reset; killed after the first commits; then again."""
    made = kizami("convert", str(run.source), str(run.out), "--max-shard-size", "100KB", "-q")
    assert made.code == 0, made.stderr
    with LocalHub(run.out.parent / "hub") as hub:
        hub.add_repo("org/tiny", {"notes.txt": b"a stranger's"})
        env = hub.environment(run.out.parent / "home")
        hub.faults.add(
            Fault("status", method="POST", path="/commit/", status=429, headers={"Retry-After": "1"}, times=2),
            Fault("status", method="PUT", path=".*", status=504),
            Fault("reset", method="PUT", path=".*", skip=2),
            Fault("status", method="POST", path="/commit/", status=503, skip=1, times=99),
        )
        killed = in_its_own(env, *run.command, kill_after=14)
        hub.faults.clear()
        there = len(hub.files("org/tiny"))
        assert killed.code == -signal.SIGKILL, killed.err
        assert 10 <= there < len(contents(run.out)), "killed half-way"
        done = in_its_own(env, *run.command)
        assert done.code == 0, done.err
        files = hub.files("org/tiny")
        assert files.pop("notes.txt") == hashlib.sha256(b"a stranger's").hexdigest()
        assert {name: sha for name, sha in files.items() if name != ".gitattributes"} == files_of(run.out)
        assert len(hub.commits("org/tiny")) - 1 <= len(files) / 10 + 1
        assert hub.token not in killed.out + killed.err + done.out + done.err
        assert "\r" not in killed.err + done.err


def memory(run: Run) -> None:
    """Case 37 with two workers: each holds one weight [4096, 8192] and its INT4 form at a time."""
    [limit] = [facts["value"] for facts in run.facts["checks"] if facts["check"].startswith("peak_rss")]
    tiny = run.cases.root / "tiny"
    found = measure(["convert", str(tiny), f"{run.out}-tiny", "--workers", "2"], [*run.command, "--workers", "2"])
    assert (found["loaded"], found["code"]) == (0, 0)
    assert found["mib"] <= limit, f"{found['mib']:.0f} MiB over the idle process"
    run.assert_right(Said(0, "", ""))


def reused_folder(run: Run) -> None:
    shutil.copytree(run.case / "out", run.out)
    before = contents(run.out)
    assert_refused(kizami(*run.command), run.mentions)
    assert error_object(kizami(*run.command, "--json"))["code"] == "out_exists"
    assert contents(run.out) == before
    assert not run.partial.exists()


def header_length(run: Run) -> None:
    plainly(run)
    found = measure(["inspect", str(run.cases.root / "tiny")], run.command)
    assert (found["loaded"], found["code"]) == (0, 2)
    assert found["seconds"] < 1
    assert found["mib"] < 200


def outside_the_folder(run: Run) -> None:
    """Case 41. What is opened is watched from within the interpreter."""
    plainly(run)
    found = measure(["inspect", str(run.cases.root / "tiny")], run.command)
    assert found["code"] == 2
    names = {Path(path).name for path in found["opened"]}
    assert "config.json" in names, "the watch sees what is opened"
    assert not names & {"evil.safetensors", "outside.safetensors"}


def forced_kv_scales(run: Run) -> None:
    """Case 43: TINY caches a latent. Engines spoil attention with scales other than 1.0 there, so kizami writes none
    unless it is forced to, and for SGLang's loader of the class they have the name of a projection."""
    scales = str(run.case / "kv.safetensors")
    if run.facts["checks"][0]["check"] == "kv_scale_tensors":
        assert_refused(kizami(*run.command), ["layer 0 has a KV scale of 0.04", "--force-kv-scales"])
        assert not run.out.exists()
        said = kizami(*run.command, "--force-kv-scales")
        assert_mentions(said.stderr, ["SGLang writes it without the scale and multiplies by it when it reads"])
        run.assert_right(said)
        return
    [facts] = run.facts["checks"]
    made = run.out.with_suffix(".json")
    command = ["kv-scales", run.source, "--from", scales, "--format", "sglang"]
    command += ["--tp", str(len(facts["if_rule_is_max"]["kv_cache"]["scaling_factor"])), "-o", made]
    assert_refused(kizami(*command), ["DeepseekV3ForCausalLM has no load_kv_cache_scales"])
    assert not made.exists()
    said = kizami(*command, "--force")
    assert said.code == 0
    assert_mentions(said.stderr, ["one number per layer: the larger of K's and V's is written of layers 0-1"])
    file, wanted = json.loads(made.read_text()), facts["if_rule_is_max"]
    assert file["model_type"] == wanted["model_type"]
    assert file["kv_cache"]["dtype"] == wanted["kv_cache"]["dtype"]
    ranks = file["kv_cache"]["scaling_factor"]
    as_float32 = {
        rank: {layer: float(np.float32(scale)) for layer, scale in layers.items()}
        for rank, layers in wanted["kv_cache"]["scaling_factor"].items()
    }
    assert ranks == as_float32


PROCEDURES: dict[int, Callable[[Run], None]] = {
    15: plan_for_ranks,
    19: with_statistics,
    35: disk_full,
    36: killed_after_the_first_shard,
    37: memory,
    39: reused_folder,
    40: header_length,
    41: outside_the_folder,
    43: forced_kv_scales,
    44: uploads_that_fail_half_way,
    48: killed_after_the_third_shard,
}


# ---------------------------------------------------------------- the tests


def parameters() -> list[Any]:
    made = []
    for number, names in RUNS.items():
        marks = [pytest.mark.slow] if number in SLOW else [pytest.mark.long] if number in LONG else []
        for name in names:
            made.append(pytest.param(number, name, marks=marks, id=f"case-{number:02d}-{name}"))
    return made


@pytest.mark.parametrize(("number", "name"), parameters())
def test_run(cases: Cases, tmp_path: Path, number: int, name: str) -> None:
    run = Run(cases, number, name, tmp_path)
    PROCEDURES.get(number, plainly)(run)
    shutil.rmtree(tmp_path)


def test_every_run_of_the_generator_is_listed(cases: Cases) -> None:
    assert {number: tuple(run["name"] for run in case["runs"]) for number, case in cases.of.items()} == RUNS


def test_every_check_is_used_or_waits_for_a_later_option(cases: Cases) -> None:
    asked = {
        facts["check"]: number
        for number, case in cases.of.items()
        for run in case["runs"]
        for facts in run.get("checks", ())
    }
    unknown = {number for name, number in asked.items() if name not in case_checks.CHECKS}
    assert unknown <= {37, 43}  # 43: of a file that is no output; its procedure looks at it
    assert set(case_checks.CHECKS) <= set(asked)
