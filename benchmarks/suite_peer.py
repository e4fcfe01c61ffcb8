"""llm-compressor's model-free path, on the same work as `kizami convert`.

    PYTHON benchmarks/suite_peer.py SRC OUT GROUP_SIZE minmax|mse

PYTHON is that of an environment with llm-compressor; kizami need not be in it.
"""

import sys

from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from llmcompressor import model_free_ptq

# Every FP8 linear is named for the dequantiser (else it fails), the experts alone for the scheme: kizami's default.
EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
LINEARS = r"re:.*_proj(_with_mqa)?$"
OBSERVERS = {"minmax": "memoryless_minmax", "mse": "memoryless_mse"}


def main() -> None:
    source, out, group_size, method = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size, observer=OBSERVERS[method]
    )
    scheme = QuantizationScheme(targets=[EXPERTS], weights=weights, format="pack-quantized")
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=[])
    model_free_ptq(source, out, config=config, device="cpu", converter=FP8BlockDequantizer(targets=[LINEARS]))


if __name__ == "__main__":
    main()
