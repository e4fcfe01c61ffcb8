"""Physical pages: per layer one uint8 buffer [pages, page_size * row_bytes], and rows written to and read from slots.

A slot is page * page_size + the token's place in its page, as in SGLang's `out_cache_loc` and vLLM's `slot_mapping`.
Who owns which page is not known here: pages.py keeps that.
"""

from collections.abc import Sequence

import torch

from kizami.quantize.kv_cache.layouts import Codec, packed

CPU_ROWS = 1024  # 576 float32 values each: 2.4 MB


class PageStore(torch.nn.Module):
    """The bytes of a cache, all layers over the same page ids. `.to(device)` moves them.

    codecs: one per layer; layers may differ (BF16 where FP8 hurts, other scales), and the index keys of a layer are a
    layer of their own. Pages are not cleared: a slot holds what was last written there, at first zeros.
    """

    def __init__(
        self, codecs: Sequence[Codec], *, pages: int, page_size: int = 64, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        if not codecs or pages < 1 or page_size < 1:
            raise ValueError(f"{len(codecs)} layers, {pages} pages of {page_size} tokens, expected at least 1 of each")
        self.codecs = tuple(codecs)
        self.pages = pages
        self.page_size = page_size
        for layer, codec in enumerate(codecs):
            buffer = torch.zeros(pages, page_size * codec.row_bytes, dtype=torch.uint8, device=device)
            self.register_buffer(f"layer_{layer}", buffer, persistent=False)

    @property
    def layers(self) -> int:
        return len(self.codecs)

    @property
    def device(self) -> torch.device:
        return self.bytes_of(0).device

    def bytes_of(self, layer: int) -> torch.Tensor:
        """uint8 [pages, page_size * row_bytes]: the memory itself, for hashes, checks and transport."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer}, expected 0 to {self.layers - 1}")
        return self.get_buffer(f"layer_{layer}")

    def write(self, layer: int, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Encode values [n, width] into slots int64 [n], which are distinct: all requests of a step at once."""
        if len(slots) != len(values):
            raise ValueError(f"{len(values)} values for {len(slots)} slots, expected as many")
        step = self._step(len(slots))
        for i in range(0, len(slots), step):
            rows = self.codecs[layer].encode(values[i : i + step].to(self.device))
            self.write_rows(layer, slots[i : i + step], rows)

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Values [n, width] in slots int64 [n], decoded in float32, then rounded to `dtype`."""
        codec, step = self.codecs[layer], self._step(len(slots))
        values = torch.empty(len(slots), codec.width, dtype=dtype, device=self.device)
        for i in range(0, len(slots), step):
            values[i : i + step] = codec.decode(self.read_rows(layer, slots[i : i + step]))
        return values

    def write_rows(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows uint8 [n, row_bytes], as a codec makes them, into slots int64 [n]."""
        row_bytes = self.codecs[layer].row_bytes
        if rows.dtype != torch.uint8 or rows.shape != (len(slots), row_bytes):
            raise ValueError(f"rows {rows.dtype} {list(rows.shape)}, expected uint8 {[len(slots), row_bytes]}")
        page, place = self._split(slots)
        for part, size, at in self._parts(layer):
            part[page, place] = _words(rows[:, at : at + size], part.dtype)

    def read_rows(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """uint8 [n, row_bytes] in slots int64 [n]."""
        page, place = self._split(slots)
        parts = [part[page, place].view(torch.uint8) for part, _, _ in self._parts(layer)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def copy_page(self, source: int, destination: int) -> None:
        """All layers' bytes of one page."""
        for layer in range(self.layers):
            self.bytes_of(layer)[destination] = self.bytes_of(layer)[source]

    def _step(self, rows: int) -> int:
        """How many rows to code at once: on a CPU what fits its cache, some six times faster than all of many rows."""
        return CPU_ROWS if self.device.type == "cpu" else max(1, rows)

    def _split(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slots.to(self.device)
        last = self.pages * self.page_size - 1
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) <= last:
            raise ValueError(
                f"slots from {int(slots.min())} to {int(slots.max())}, expected 0 to {last}; engines' slot mappings "
                "pad with -1: leave those rows out"
            )
        return slots.div(self.page_size, rounding_mode="floor"), slots % self.page_size

    def _parts(self, layer: int) -> list[tuple[torch.Tensor, int, int]]:
        """Per part of a row: its view [pages, page_size, words], its size in bytes and its place in the row."""
        views, at = [], 0
        for size in self.codecs[layer].segments:
            start = at * self.page_size
            part = torch.unflatten(
                self.bytes_of(layer)[:, start : start + size * self.page_size], 1, (self.page_size, size)
            )
            views.append((part.view(_word(part)), size, at))
            at += size
        return views


def _word(view: torch.Tensor) -> torch.dtype:
    """The widest integer that the rows of a byte view can be moved as: eight bytes a step are not eight steps."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if not any(n % dtype.itemsize for n in (view.shape[-1], view.storage_offset(), *view.stride()[:-1])):
            return dtype
    return torch.uint8


def _words(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows = rows.contiguous()
    aligned = rows.storage_offset() % dtype.itemsize == 0 and rows.stride(0) % dtype.itemsize == 0
    return (rows if aligned else packed(rows)).view(dtype)
