"""A run of BF16 pages becomes FP8 pages: what a BF16 prefill would need to feed an FP8 decode. No engine has it.

SGLang and vLLM refuse two sides with different KV dtypes, and before SGLang's check the sender's item length was used
for both: silent corruption (sglang #19398). A conversion needs from the receiver, before the first byte is sent:

- the codec of each layer: layout, and for `fp8` rows the scale. SGLang's handshake compares the dtype string alone,
  under which there are rows of 576 and of 656 bytes; `signature` is what must be equal instead.
- its page size, which is the item length together with the codec (page_size * row_bytes), and the page ids.
- memory to convert into: a sender that writes by RDMA builds a `PageStore` with the receiver's codecs and page size as
  its staging buffer, converts into that, and sends those bytes.
- a checksum after conversion: the sender's BF16 bytes are gone on the other side. `Receipt` has it per layer, over the
  rows in token order, so that page sizes and page ids do not matter; the receiver computes it from its own pages.

Rows in the same form on both sides (index keys: FP8 everywhere) are moved byte for byte. The converted bytes are those
that the receiver would have written from the BF16 values itself, on any device. FP8 to another FP8 form is refused: it
would round a second time.

    receipt = transfer(prefill, "a", decode, "a")
    assert not damaged(decode.store, decode.slots(["a"]), receipt)
"""

import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kizami.quantize.kv_cache.layouts import Bf16Rows
from kizami.quantize.kv_cache.pages import PagedCache
from kizami.quantize.kv_cache.store import PageStore

CHUNK = 1024  # tokens; with 576 values a row less than 10 MB of working memory, some of it in a CPU's cache
ADLER = 65521  # the largest prime below 2^16: RFC 1950, section 9


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was sent: tokens, bytes of all layers, and per layer the Adler-32 of the receiver's rows in token order."""

    tokens: int
    bytes: int
    checksums: tuple[int, ...]


def signature(store: PageStore) -> str:
    """What a receiver announces, page size and the codec of every layer: equal strings mean equal bytes."""
    return "; ".join([f"page_size={store.page_size}", *map(repr, store.codecs)])


def transfer(
    source: PagedCache, request: Hashable, destination: PagedCache, into: Hashable, *, chunk: int = CHUNK
) -> Receipt:
    """All tokens of a request into a new one of another cache, whose pages it allocates; nothing stays if it fails.

    KizamiError for an unknown request, one that is there already, or too few pages; ValueError as `convert_run`.
    """
    _checked(source.store, destination.store)
    slots = source.slots([request])
    destination.add(into)
    try:
        there = destination.allocate([into], [len(slots)])
        return convert_run(source.store, slots, destination.store, there, chunk=chunk)
    except BaseException:
        destination.free([into])
        raise


def convert_run(
    source: PageStore, slots: torch.Tensor, destination: PageStore, there: torch.Tensor, *, chunk: int = CHUNK
) -> Receipt:
    """Rows of `slots` int64 [n] of the source into slots `there` int64 [n] of the destination, layer by layer.

    `slots_of` makes slots of a list of pages; page sizes and devices may differ. `chunk` tokens are in flight at once.
    ValueError, before anything is written, where the layers do not match or a conversion would round twice.
    """
    _checked(source, destination)
    if len(slots) != len(there) or chunk < 1:
        raise ValueError(f"{len(slots)} slots into {len(there)}, {chunk} at a time, expected as many, and at least 1")
    checksums = []
    for layer, (sent, kept) in enumerate(zip(source.codecs, destination.codecs, strict=True)):
        value = 1
        for a, b in zip(_split(slots, chunk), _split(there, chunk), strict=True):
            rows = source.read_rows(layer, a).to(destination.device)
            if isinstance(sent, Bf16Rows) and sent != kept:
                rows = kept.encode(sent.as_bf16(rows))
            destination.write_rows(layer, b, rows)
            value = adler32(rows, value)
        checksums.append(value)
    row_bytes = sum(codec.row_bytes for codec in destination.codecs)
    return Receipt(len(slots), len(slots) * row_bytes, tuple(checksums))


def slots_of(pages: Sequence[int], tokens: int, page_size: int) -> torch.Tensor:
    """int64 [tokens]: the slots of a run that fills these pages in order; the last may be partial."""
    if not 0 <= tokens <= len(pages) * page_size:
        raise ValueError(
            f"{tokens} tokens in {len(pages)} pages of {page_size}, expected 0 to {len(pages) * page_size}"
        )
    first = torch.tensor(list(pages), dtype=torch.int64)[:, None] * page_size
    return (first + torch.arange(page_size)).flatten()[:tokens]


def damaged(store: PageStore, slots: torch.Tensor, receipt: Receipt, *, chunk: int = CHUNK) -> list[int]:
    """The layers whose rows in `slots` are not those of the receipt: the receiver's check. All of them if the number of
    tokens is another."""
    if len(slots) != receipt.tokens or store.layers != len(receipt.checksums):
        return list(range(store.layers))
    parts = _split(slots, chunk)
    found = [_checksum(store.read_rows(layer, part) for part in parts) for layer in range(store.layers)]
    return [layer for layer, value in enumerate(found) if value != receipt.checksums[layer]]


def adler32(rows: torch.Tensor, value: int = 1) -> int:
    """Adler-32 (RFC 1950) of uint8 rows, continued from `value`; the same number on every device."""
    return (
        zlib.adler32(rows.contiguous().numpy().data, value)
        if rows.device.type == "cpu"
        else adler32_vectorised(rows, value)
    )


def adler32_vectorised(rows: torch.Tensor, value: int = 1) -> int:
    """The same as sums over rows, without a loop over bytes. Below 2^63 for up to 2^27 bytes in rows of up to 2^20."""
    if rows.numel() == 0:
        return value
    n, width = rows.shape
    a, b = value & 0xFFFF, value >> 16
    left = torch.arange(width, 0, -1, dtype=torch.int64, device=rows.device)  # how often `b` counts a byte in its row
    wide = rows.to(torch.int64)
    sums, weighted = wide.sum(1), (wide * left).sum(1)
    later = torch.arange(n - 1, -1, -1, dtype=torch.int64, device=rows.device)  # rows after it
    total = int((weighted + sums * later * width).sum())
    b = (b + rows.numel() * a + total) % ADLER
    return b << 16 | (a + int(sums.sum())) % ADLER


def _split(slots: torch.Tensor, chunk: int) -> list[torch.Tensor]:
    return [slots[i : i + chunk] for i in range(0, len(slots), chunk)]


def _checksum(parts: Iterator[torch.Tensor]) -> int:
    value = 1
    for rows in parts:
        value = adler32(rows, value)
    return value


def _checked(source: PageStore, destination: PageStore) -> None:
    if source.layers != destination.layers:
        raise ValueError(f"{source.layers} layers into {destination.layers}, expected as many")
    for layer, (a, b) in enumerate(zip(source.codecs, destination.codecs, strict=True)):
        if a.width != b.width:
            raise ValueError(f"layer {layer}: {a.width} values a token into {b.width}, expected as many")
        if a != b and not isinstance(a, Bf16Rows):
            raise ValueError(f"layer {layer}: {a!r} into {b!r} would round twice, expected BF16 or the same form")
