"""Plans of full-size checkpoints, to the byte. The sources are headers with holes for data: 26 MB of disk for 700 GB.

The expected totals are published sizes or follow from them; inventory.py says which.
"""

import json
import subprocess
import sys
from pathlib import Path

import inventory
import pytest

from kizami.formats.checkpoint import Checkpoint
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy

# name, source bytes, output bytes under the default policy
PUBLISHED = [
    ("glm-5.2-fp8", 755_617_140_416, 450_903_738_368),
    ("glm-5-fp8", 756_162_687_872, 451_972_135_424),
    ("kimi-k2-fp8", 1_029_173_256_720, 594_205_911_728),
]
POLICIES = [  # chosen so that each value of each option occurs; a plan of this size takes seconds
    ("glm-5.2-fp8", inventory.Policy(64, "fp8", "keep")),
    ("glm-5.2-fp8", inventory.Policy(128, "bf16", "drop")),
    ("deepseek-v3-fp8", inventory.Policy(32, "fp8", "quantize")),
]
MEASURE = """
import sys, time
from kizami.cli.app import main
start = time.monotonic()
sys.argv = ["kizami", "plan", sys.argv[1], "--json"]
try:
    main()
except SystemExit as e:
    assert not e.code, e.code
# not ru_maxrss: a child begins with its parent's peak there
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.monotonic() - start, int(peak) // 1024, file=sys.stderr)
"""


@pytest.fixture(scope="session")
def sparse(tmp_path_factory: pytest.TempPathFactory):
    """name -> folder of the sparse checkpoint, written once."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("sparse") / name
            inventory.write_sparse(folders[name], name)
        return folders[name]

    return folder


@pytest.mark.long
@pytest.mark.parametrize(("name", "source", "output"), PUBLISHED)
def test_a_plan_gives_the_published_bytes_in_20_s_and_600_mb(sparse, name, source, output):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(sparse(name))], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    seconds, mib = map(float, done.stderr.split()[-2:])
    assert (plan["source"]["bytes"], plan["output"]["bytes"]) == (source, output)
    assert seconds < 20
    assert mib < 600


@pytest.mark.long
@pytest.mark.parametrize(("name", "policy"), POLICIES)
def test_a_plan_writes_exactly_the_tensors_of_the_inventory(sparse, name, policy):
    ours = Policy(group_size=policy.group, rest=policy.rest, mtp=policy.mtp)
    plan = build_plan(Checkpoint.open(sparse(name)), ours, Method())
    written = {(s.name, s.dtype, s.shape) for shard in plan.shards for s in shard.tensors}
    assert written == {(t.name, t.dtype, t.shape) for t in inventory.converted_tensors(name, policy)}


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in inventory.MODELS if n.startswith("glm-4") and n.endswith("fp8")])
def test_channel_fp8_of_glm_4_is_planned_like_the_blocks_of_glm_5(sparse, name):
    plan = build_plan(Checkpoint.open(sparse(name)), Policy(), Method())
    assert {step.encoding.block[0] for step in plan.packed} == {1}
    assert {step.place.role.value for step in plan.packed} == {"routed_expert"}
