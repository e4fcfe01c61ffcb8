"""What `kizami evaluate -o` writes of a text and of a task, one example of each."""

FIGURES = {
    "kl_mean": 0.0018, "kl_p999": 0.08, "top1": 0.965, "perplexity": 68.489, "perplexity_other": 68.488,
    "nll_delta": -0.0009, "nll_delta_interval": [-0.0034, 0.0016],
}  # fmt: skip
TASK = {
    "task": "gsm8k", "metric": "exact_match", "n": 1319, "a": 0.9439, "b": 0.9356, "drop": 0.0083,
    "interval": [-0.0012, 0.0178], "p_value": 0.117, "visible_drop": 0.0136,
}  # fmt: skip
