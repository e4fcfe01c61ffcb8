"""Evaluation of checkpoints on text: the figures of whole models, domains, the control, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import kv_accuracy_oracle as oracle
import torch
from calibration_runs import random_tokens
from client_fixtures import convert

from kizami.calibration.evaluation.streamed import (
    Candidate,
    Compared,
    Domain,
    Options,
    evaluate_streamed,
    join_texts,
    over_sequences,
)
from kizami.calibration.kv_accuracy.measures import TokenMeasures
from kizami.calibration.kv_accuracy.variants import Variant
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.serving.kv_layout import Layout

pytestmark = pytest.mark.long

RAW = Variant("fp8 at 1.0", Layout.RAW)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def int4(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(demo_checkpoint, tmp_path_factory.mktemp("int4") / "out", "-q")


def candidate(folder: Path, name: str, *variants: Variant) -> Candidate:
    return Candidate(name, Checkpoint.open(folder), variants)


def test_the_figures_are_those_of_whole_models(
    demo_checkpoint: Path, int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(demo_checkpoint, 2, 48)
    twin = convert(int4, tmp_path / "twin", "--scheme", "bf16", "-q")
    texts = join_texts([("random", tokens)])
    plain, rounded, again = evaluate_streamed(
        candidate(demo_checkpoint, "A"),
        [candidate(int4, "B", RAW), candidate(demo_checkpoint, "A again")],
        texts,
        Options(),
    )
    assert (plain.name, rounded.name, again.name) == ("B", "B, KV fp8 at 1.0", "A again")
    unit = oracle.scaled((1.0,))
    ours = oracle.logits(demo_checkpoint, tokens.ids, oracle.bf16, oracle.bf16, monkeypatch)
    for found, by in ((plain, oracle.bf16), (rounded, unit)):
        other = oracle.logits(twin, tokens.ids, by, by, monkeypatch)
        kl = oracle.kl(ours, other)
        assert kl.mean() > 1e-4
        assert found.tokens.kl.mean() == pytest.approx(kl.mean(), rel=5e-3)
        assert np.median(np.abs(found.tokens.kl - kl)) < 1e-6
        expected = oracle.nll(other, tokens.ids) - oracle.nll(ours, tokens.ids)
        assert np.median(np.abs(found.tokens.nll_delta[:, :-1] - expected)) < 1e-5
        targets = torch.from_numpy(tokens.ids[:, 1:])
        right, right_other = ((x[:, :-1].argmax(-1) == targets).numpy() for x in (ours, other))
        assert (found.tokens.right[:, :-1] != right).sum() <= 1
        assert (found.tokens.right_other[:, :-1] != right_other).sum() <= 1
        assert not found.tokens.right[:, -1].any(), "the last token has no next"
    assert again.tokens.kl.max() == 0.0, "the same model gives the very same logits"
    assert again.tokens.same.all()
    assert np.nanmax(np.abs(again.tokens.nll_delta)) == 0.0


def test_domains_are_rows_of_one_set() -> None:
    from kizami.calibration.data.mix import Mix
    from kizami.calibration.data.tokens import TokenSet

    def made(rows: int, first: int) -> TokenSet:
        ids = np.arange(first, first + rows * 4, dtype=np.int32).reshape(rows, 4)
        return TokenSet(ids, (), "", (), Mix(0, 0, 0, ()))

    texts = join_texts([("prose", made(2, 0)), ("code", made(1, 100))])
    assert texts.ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103]]
    assert texts.domains == (Domain("prose", 0, 2), Domain("code", 2, 3))


def measures(right: list[list[int]], other: list[list[int]], deltas: list[list[float]]) -> TokenMeasures:
    """The last position of each sequence has no next token."""
    nll = np.zeros((len(right), len(right[0])))
    nll[:, -1] = np.nan
    flags = [np.array(rows, bool) for rows in (right, other)]
    delta = np.array(deltas, float)
    delta[:, -1] = np.nan
    return TokenMeasures(np.zeros_like(nll), flags[0] == flags[1], nll, delta, np.ones_like(nll, bool), *flags)


def test_next_tokens_are_lost_and_won_and_intervals_are_over_sequences() -> None:
    tokens = measures(
        [[1, 1, 0, 0], [1, 1, 1, 0]], [[0, 1, 1, 0], [0, 0, 1, 0]], [[0.1, 0.2, 0.3, 9], [0.5, 0.5, 0.5, 9]]
    )
    found = over_sequences(tokens, 0, 4)
    assert (found.lost, found.won, found.accuracy) == (3, 1, 5 / 6)
    assert found.accuracy_drop == pytest.approx(2 / 6)
    half = 12.706204736174694 * np.std([0.2, 0.5], ddof=1) / np.sqrt(2)
    assert found.nll_delta_interval == pytest.approx((0.35 - half, 0.35 + half))
    half = 12.706204736174694 * np.std([0, 2 / 3], ddof=1) / np.sqrt(2)
    assert found.accuracy_drop_interval == pytest.approx((1 / 3 - half, 1 / 3 + half))
    assert over_sequences(tokens, 1, 2).lost == 1
    assert over_sequences(tokens, 3, 4).nll_delta_interval is None, "no position there has a next token"
    assert over_sequences(tokens.rows(slice(0, 1)), 0, 4).nll_delta_interval is None


def test_positions_that_are_not_finite_are_in_no_number() -> None:
    tokens = measures([[1, 1, 0], [1, 1, 0]], [[0, 0, 0], [1, 1, 0]], [[0.1, np.nan, 0], [0.3, 0.3, 0]])
    bad = np.ones((2, 3), bool)
    bad[0, 1] = False
    found = over_sequences(replace(tokens, finite=bad), 0, 3)
    assert (found.lost, found.accuracy) == (1, 1.0)
    assert found.nll_delta_interval is not None


def test_another_vocabulary_is_refused(demo_checkpoint: Path, tiny_checkpoint: Path) -> None:
    texts = join_texts([("random", random_tokens(tiny_checkpoint, 1, 16))])
    with pytest.raises(KizamiError) as refused:
        evaluate_streamed(candidate(demo_checkpoint, "A"), [candidate(tiny_checkpoint, "B")], texts, Options())
    assert refused.value.code == "vocabulary_mismatch"


def test_nothing_stays_on_the_disk(demo_checkpoint: Path, tmp_path: Path) -> None:
    texts = join_texts([("random", random_tokens(demo_checkpoint, 1, 16))])
    seen: list[Compared] = list(
        evaluate_streamed(
            candidate(demo_checkpoint, "A"), [candidate(demo_checkpoint, "B")], texts, Options(scratch=tmp_path)
        )
    )
    assert len(seen) == 1
    assert list(tmp_path.iterdir()) == []
