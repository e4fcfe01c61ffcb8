"""A process that runs models in vLLM: reads a folder per line, answers with a line of JSON.

One of its own, because vLLM 0.32 looks through every module that is loaded and falls over llvmlite's, which numba and
so kizami's kernels load (vllm/triton_utils/dispatcher.py).
"""

import gc
import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where the plug-in is
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

import torch
import vllm_plugin
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PROMPTS = [[5, 9, 200, 17, 33, 2, 77, 140, 301, 8, 499, 64], [450, 451, 3, 3, 3, 90, 12, 7]]


def schemes_of(model: Any) -> dict[str, str]:
    """The class that computes each module: compressed-tensors' scheme where there is one, else vLLM's method."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            found[name] = type(getattr(module, "scheme", None) or method).__name__
    return found


def ask(folder: str) -> dict[str, Any]:
    """tokens: those that each prompt is continued with; log_probs: of the likeliest 5 at each place, prompts included;
    schemes: see there."""
    engine = LLM(
        folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2,
        max_num_batched_tokens=64, disable_log_stats=True, enable_prefix_caching=False,
    )  # fmt: skip
    how = SamplingParams(
        temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=5, detokenize=False, ignore_eos=True
    )  # fmt: skip
    results = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], how, use_tqdm=False)
    places = [[*result.prompt_logprobs[1:], *result.outputs[0].logprobs] for result in results]
    answer = {
        "tokens": [list(result.outputs[0].token_ids) for result in results],
        "log_probs": [{token: found.logprob for token, found in at.items()} for prompt in places for at in prompt],
        "schemes": engine.apply_model(schemes_of)[0],
    }
    del engine, results
    gc.collect()
    cleanup_dist_env_and_memory()
    return answer


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's loader talks on stdout
    vllm_plugin.install()
    torch.use_deterministic_algorithms(True)  # memory that nothing was loaded into: NaN, or the largest integer
    gc.collect()
    gc.freeze()  # vLLM collects nine times per model, and would look through all of its modules: 3 of 4 seconds
    gc.unfreeze = lambda: None
    for line in sys.stdin:
        try:
            answer = ask(line.strip())
        except (Exception, SystemExit) as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
