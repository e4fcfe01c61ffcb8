"""What INT4 costs a model: perplexity, KL divergence and top-1 agreement of a kizami output against its FP8 source.

    python examples/perplexity.py kizami-demo/tiny-glm-fp8 kizami-demo/tiny-glm-int4 --text examples/heldout.txt

heldout.txt is text that the demo's model was not trained on: Python's documentation and standard library (PSF licence).
Needs torch, transformers >= 5.24, compressed-tensors >= 0.20 and accelerate. Runs on a CPU in float32, so it is for
models that fit in memory there. The INT4 side is opened as any user opens it. The FP8 side is decoded by kizami's
reference code into a dense copy first, because transformers' own FP8 loader decodes partial blocks wrongly (it takes
rows // scale rows as the block size).
"""

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from kizami.quantize import reference


def dense_copy(fp8: Path, out: Path) -> Path:
    """Write `fp8` with every FP8 weight replaced by its float32 value and without `quantization_config`."""
    files = sorted(set(json.loads((fp8 / "model.safetensors.index.json").read_text())["weight_map"].values()))
    tensors = {name: tensor for file in files for name, tensor in load_file(fp8 / file).items()}
    config = json.loads((fp8 / "config.json").read_text())
    block = config.pop("quantization_config")["weight_block_size"]
    dense = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            codes = tensor.view(torch.uint8).numpy()
            tensor = torch.from_numpy(reference.dequantize(codes, scale.numpy(), (block[0], block[1])))
        if not name.endswith("_scale_inv"):
            dense[name] = tensor
    save_file(dense, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    for side_file in fp8.glob("*token*.json"):
        shutil.copy(side_file, out)
    return out


def load(folder: Path, **options: object) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    if info["missing_keys"]:
        raise SystemExit(f"{folder}: transformers misses {sorted(info['missing_keys'])[:5]}")
    # What compressed-tensors decoded stays BF16, and transformers forbids `.float()` on a model that was quantized.
    return torch.nn.Module.float(model).eval()


@torch.inference_mode()
def log_probabilities(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=windows).logits[:, :-1]
    return logits.float().log_softmax(-1)


def compare(fp8: torch.nn.Module, int4: torch.nn.Module, windows: torch.Tensor, batch: int = 4) -> dict[str, float]:
    """Over every predicted token: both perplexities, mean KL(FP8 || INT4) in nats, share of equal top tokens."""
    loss_fp8 = loss_int4 = kl = agree = 0.0
    for part in windows.split(batch):
        p, q = log_probabilities(fp8, part), log_probabilities(int4, part)
        target = part[:, 1:, None]
        loss_fp8 -= p.gather(-1, target).double().sum().item()
        loss_int4 -= q.gather(-1, target).double().sum().item()
        kl += (p.exp() * (p - q)).sum(-1).double().sum().item()
        agree += (p.argmax(-1) == q.argmax(-1)).sum().item()
    n = windows.shape[0] * (windows.shape[1] - 1)
    return {
        "perplexity_fp8": math.exp(loss_fp8 / n),
        "perplexity_int4": math.exp(loss_int4 / n),
        "kl": kl / n,
        "top1_agreement": agree / n,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    transformers.logging.set_verbosity_error()  # a load report for every MTP tensor; missing keys are checked in `load`
    parser.add_argument("fp8", type=Path, help="the FP8 source of the conversion")
    parser.add_argument("int4", type=Path, help="what kizami convert wrote")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that the model was not trained on")
    parser.add_argument("--tokens", type=int, default=64 * 512, help="how many tokens of it to read (default 64 x 512)")
    parser.add_argument("--window", type=int, default=512, help="tokens per sequence (default 512)")
    args = parser.parse_args()
    ids = AutoTokenizer.from_pretrained(args.fp8)(args.text.read_text("utf-8"))["input_ids"]
    count = min(args.tokens, len(ids)) // args.window
    if not count:
        parser.error(f"{args.text} gives {len(ids)} tokens; one window has {args.window}")
    windows = torch.tensor(ids[: count * args.window]).view(count, args.window)
    with tempfile.TemporaryDirectory() as scratch:
        fp8 = load(dense_copy(args.fp8, Path(scratch)))
    int4 = load(args.int4, quantization_config=CompressedTensorsConfig(dequantize=True))
    result = compare(fp8, int4, windows)
    print(f"{count} x {args.window} tokens")
    print(f"perplexity      FP8 {result['perplexity_fp8']:.3f}   INT4 {result['perplexity_int4']:.3f}")
    print(f"mean KL         {result['kl']:.5f} nats per token")
    print(f"top-1 agreement {result['top1_agreement']:.2%}")


if __name__ == "__main__":
    main()
