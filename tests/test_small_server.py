"""benchmarks/small_server.py: a real model behind OpenAI's API, which `kizami evaluate` and lm-eval ask."""

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("httpx")

import httpx
import torch
from cli_fixtures import Run
from client_fixtures import convert
from scripts import script

small_server = script("benchmarks", "small_server")


@pytest.fixture(scope="module")
def models(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    int4 = convert(demo_checkpoint, tmp_path_factory.mktemp("int4") / "out", "-q")
    return small_server.Model(demo_checkpoint), small_server.Model(int4)


@pytest.fixture
def urls(models: tuple[Any, Any]) -> Iterator[tuple[str, str]]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), small_server.handler(model)) for model in models]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield (
        f"http://127.0.0.1:{servers[0].server_port}/v1",
        f"http://127.0.0.1:{servers[1].server_port}/v1",
    )
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.long
def test_a_prompt_is_scored_as_the_model_scores_it(models: tuple[Any, Any], urls: tuple[str, str]) -> None:
    body = {"prompt": "The tide came in", "echo": True, "logprobs": 1, "max_tokens": 1, "model": "x"}
    found = httpx.post(f"{urls[0]}/completions", json=body, timeout=60).json()["choices"][0]["logprobs"]
    model = models[0]
    ids = model.tokenizer("The tide came in", return_tensors="pt").input_ids
    with torch.inference_mode():
        logs = model.model(ids).logits[0].log_softmax(-1)
    expected = [float(logs[i, int(ids[0, i + 1])]) for i in range(ids.shape[1] - 1)]
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-5)
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == ids.shape[1] + 1


@pytest.mark.long
def test_two_real_endpoints_are_compared_end_to_end(kizami: Run, urls: tuple[str, str], tmp_path: Path) -> None:
    """Of a toy that cannot call tools: all it shows is that everything works, and that a server agrees with itself."""
    shipped = files("kizami.calibration.evaluation").joinpath("requests", "tools.jsonl").read_text().splitlines()
    (tmp_path / "r.jsonl").write_text("\n".join(shipped[:3]))
    words = ["evaluate", *urls, "--requests", tmp_path / "r.jsonl", "--max-tokens", 8, "--concurrency", 2, "--control"]
    done = kizami(*words, "-o", tmp_path / "e.json", "--json")
    assert done.code == 0, done.err
    int4, control = done.json["compared"]
    assert [task["n"] for task in int4["tasks"]] == [3, 3]
    assert [task["discordance"] for task in control["tasks"]] == [0.0, 0.0]
    assert control["turns"] == done.json["reference_turns"]["turns"]
    assert (tmp_path / "e.json").exists()
