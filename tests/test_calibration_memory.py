"""What a run takes of memory: measured on a checkpoint of Kimi-K2's width, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import numpy as np
from wide_checkpoint import write_wide

SEQ_LEN = 2048
EXPERTS = 24  # 384 took 3.5 minutes, and 1.39 GB
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[3])
from calibration_oracle import token_set
from kizami.calibration.forward.run import run_calibration, Started
from kizami.calibration.forward.settings import Settings
from kizami.formats.checkpoint import Checkpoint
ids = np.load(sys.argv[4])
def look(event):
    if isinstance(event, Started):
        print(event.chunks.needed)
run_calibration(Checkpoint.open(sys.argv[1]), token_set(ids, ()), Path(sys.argv[2]), Settings(keep="all"), look)
status = Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_layers_as_wide_as_kimi_k2_take_less_than_two_gigabytes(tmp_path: Path) -> None:
    """7168 wide, 64 heads, a dense layer of 18432; a vocabulary of 163,840. 24 of Kimi's 384 experts, whose number
    only takes time: one is in memory at a time."""
    ids = np.random.default_rng(0).integers(0, 163840, (1, SEQ_LEN))
    np.save(tmp_path / "ids.npy", ids)
    source = write_wide(tmp_path / "src", 2, ids, EXPERTS)
    arguments = [str(source), str(tmp_path / "stats"), str(Path(__file__).parent), str(tmp_path / "ids.npy")]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    needed, peak = map(int, done.stdout.split())
    assert peak < 2_000_000_000
    assert peak < needed < 1.5 * peak  # what a run says that it needs is near what it takes, and never less
