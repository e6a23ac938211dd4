"""PagedKvCache: keys, values and index keys of many sequences in one pool of pages. Needs PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from .batch import Batch
from .config import MsaConfig
from .errors import InvalidArgumentError, OutOfPagesError, UnsupportedError
from .info import why_unsupported
from .ops import write_pages


@dataclasses.dataclass(eq=False)
class _Sequence:
    pages: np.ndarray  # int32; the first ceil(length / block_size) entries are in use
    length: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class CacheStep:
    """One step of a model over some sequences: made once by :meth:`PagedKvCache.extend`, used by every layer."""

    cache: "PagedKvCache"
    seqs: tuple[Hashable, ...]
    batch: Batch
    """Where the step's queries stand and where their keys lie."""
    slots: torch.Tensor
    """int64 [T]: where each new token is stored: page * block_size + place in the page."""
    positions: torch.Tensor
    """int64 [T]: its position in its sequence."""
    _memory: torch.Tensor
    """What all the tensors above are views of: one copy to the device per step."""

    def write(self, k: torch.Tensor, v: torch.Tensor, k_idx: torch.Tensor, layer: int = 0) -> None:
        """Stores the step's keys and values [T, Hkv, D] and index keys [T, Di] of one layer."""
        self.cache.write(self.slots, k, v, k_idx, layer)

    def keys(self, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The layer's pages (k, v, k_idx), as the operators take them together with ``batch``."""
        return self.cache.k[layer], self.cache.v[layer], self.cache.k_idx[layer]


_ALIGNMENT = 16  # bytes, of each array in a step's memory


def _upload(
    arrays: Sequence[np.ndarray], device: torch.device, memory: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The arrays on the device, in one copy that waits for nothing: (memory, views of it). A given ``memory`` is overwritten."""
    offsets = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
    with torch.inference_mode(False):  # a step made under inference mode may be refilled outside it
        host = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        for array, first in zip(arrays, offsets):
            host.numpy()[first : first + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        if memory is None:
            memory = host.to(device, non_blocking=True)
        else:
            memory.copy_(host, non_blocking=True)
    views = []
    for array, first in zip(arrays, offsets):
        dtype = torch.int64 if array.dtype == np.int64 else torch.int32
        views.append(memory[first : first + array.nbytes].view(dtype).view(array.shape))
    return memory, views


def _paged_batch(fields: list[torch.Tensor], max_seqlen_q: int, max_seqlen_k: int) -> Batch:
    cu_seqlens_q, seqlens_k, page_table = fields
    return Batch(
        cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k, page_table=page_table, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )


class PagedKvCache:
    """A fixed pool of pages, each holding ``block_size`` tokens of keys, values and index keys for every layer.

    Sequences are named by any hashable value. Index keys live in the same pages as keys and values and share their fate: no
    operation moves, copies or drops one without the other.

    >>> cache = PagedKvCache(config, num_pages=1024, num_layers=60, dtype=torch.bfloat16)
    >>> step = cache.extend(["chat 1", "chat 2"], [1, 700])      # room for 1 and 700 new tokens; once per model step
    >>> for layer in range(60):
    ...     step.write(k, v, k_idx, layer)                       # [701, Hkv, D] twice, [701, Di]
    ...     out = openmsa.msa_attention(q, *step.keys(layer)[:2], q_idx, step.keys(layer)[2], step.batch, config)

    On a GPU no call here waits for the device, unless its text says so. A CUDA graph holds a step that is made once, with room to
    grow, and refilled before each replay (on the stream of the replay):

    >>> step = cache.extend(chats, [1] * len(chats), max_seqlen=32768)
    >>> with torch.cuda.graph(graph):
    ...     out = model(hidden, step)
    >>> step = cache.extend(chats, [1] * len(chats), into=step)
    >>> graph.replay()

    :ivar k: [num_layers, num_pages, Hkv, Bk, D]; v alike
    :ivar k_idx: [num_layers, num_pages, Bk, Di]
    """

    def __init__(
        self, config: MsaConfig, num_pages: int, *, num_layers: int = 1, dtype: torch.dtype | None = None, device: Any = "cpu"
    ) -> None:
        if config.index_dim < 1:
            raise InvalidArgumentError(
                "config.index_dim is 0; a cache holds index keys. Set it to their width.", "config.index_dim"
            )
        if num_pages < 1 or num_layers < 1:
            raise InvalidArgumentError(
                f"num_pages is {num_pages} and num_layers is {num_layers}; both must be at least 1.", "num_pages"
            )
        if torch.device(device).type == "cuda":
            dtype = torch.get_default_dtype() if dtype is None else dtype
            reason = why_unsupported("cuda", str(dtype).removeprefix("torch."), config)
            if reason:
                raise UnsupportedError(
                    f"device is {device}, and the GPU kernels could not read this cache: {reason}. Pass dtype=torch.bfloat16 and sizes "
                    "that `openmsa info` lists, or keep the cache on the CPU.",
                    "device",
                )
        self.config = config
        self.num_pages = num_pages
        self.num_layers = num_layers
        # Left uninitialised: the operators never read a slot that no token was written to.
        shape = (num_layers, num_pages, config.num_kv_heads, config.block_size, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.k_idx = torch.empty((num_layers, num_pages, config.block_size, config.index_dim), dtype=dtype, device=device)
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_users = np.zeros(num_pages, dtype=np.int32)  # sequences that a page belongs to; copies share pages
        self._seqs: dict[Hashable, _Sequence] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def seqs(self) -> tuple[Hashable, ...]:
        """The sequences held."""
        return tuple(self._seqs)

    def __contains__(self, seq: Hashable) -> bool:
        return seq in self._seqs

    def seqlen(self, seq: Hashable) -> int:
        """Tokens held of a sequence; 0 for one that is not held."""
        held = self._seqs.get(seq)
        return held.length if held else 0

    def extend(
        self, seqs: Sequence[Hashable], seqlens: Sequence[int], *, max_seqlen: int | None = None, into: CacheStep | None = None
    ) -> CacheStep:
        """Makes room for ``seqlens[i]`` new tokens at the end of sequence ``seqs[i]``; new names start new sequences.

        Every layer's keys must then be written (:meth:`CacheStep.write`) before attention reads them. Raises OutOfPagesError, and
        changes nothing, if the pool is too small.

        :param max_seqlen: make the step's tables wide enough for sequences of this many tokens, for later use as ``into``
        :param into: an earlier step of as many sequences and new tokens, whose tensors are overwritten: a CUDA graph that was
            captured with that step then runs this one
        """
        seqs, seqlens = tuple(seqs), [int(n) for n in seqlens]
        if len(seqs) != len(seqlens) or len(set(seqs)) != len(seqs) or min(seqlens, default=0) < 0:
            raise InvalidArgumentError(
                f"seqlens is {seqlens} for seqs {list(seqs)}; give each sequence once, with one length of at least 0.", "seqlens"
            )
        longest = max((self.seqlen(seq) + n for seq, n in zip(seqs, seqlens)), default=0)
        if into is None:
            bound = max(longest, max_seqlen or 0)
        else:
            self._check_into(into, seqlens, longest)
            bound = into.batch.max_seqlen_k
        self._require_pages(seqs, seqlens)
        parts = [self._grow(seq, n) for seq, n in zip(seqs, seqlens)]
        rows = [np.concatenate([part[i] for part in parts] or [np.empty(0)]).astype(np.int64, copy=False) for i in range(2)]
        fields = self._batch_fields([self._seqs[seq] for seq in seqs], seqlens, bound)
        if into is not None:
            _upload([*rows, *fields], self.device, into._memory)
            return dataclasses.replace(into, seqs=seqs)
        memory, (slots, positions, *fields) = _upload([*rows, *fields], self.device)
        batch = _paged_batch(fields, max(seqlens, default=0), bound)
        return CacheStep(self, seqs, batch, slots, positions, memory)

    def _check_into(self, into: CacheStep, seqlens: list[int], longest: int) -> None:
        batch = into.batch
        if into.cache is not self:
            raise InvalidArgumentError("into is a step of another cache; pass one that this cache's extend() returned.", "into")
        if len(seqlens) != batch.num_seqs or sum(seqlens) != into.slots.shape[0] or max(seqlens, default=0) > batch.max_seqlen_q:
            raise InvalidArgumentError(
                f"into was made for {batch.num_seqs} sequences with {into.slots.shape[0]} new tokens, at most {batch.max_seqlen_q} each; "
                f"seqlens is {seqlens}. Make another step for these.",
                "into",
            )
        if longest > batch.max_seqlen_k:
            raise InvalidArgumentError(
                f"into was made for sequences of up to {batch.max_seqlen_k} tokens; the longest would hold {longest}. Make a step with "
                "a larger max_seqlen.",
                "into",
            )

    def append(self, seq: Hashable, k: torch.Tensor, v: torch.Tensor, k_idx: torch.Tensor) -> None:
        """Adds tokens to the end of one sequence of a cache with a single layer; with more layers use :meth:`extend`.

        :param k: [n, Hkv, D]; v alike
        :param k_idx: [n, Di]
        """
        if self.num_layers != 1:
            raise InvalidArgumentError(
                f"append() serves caches with one layer, this one has {self.num_layers}. Call extend(), then write() per layer.",
                "seq",
            )
        self._check_rows(k.shape[0] if k.ndim else 0, k, v, k_idx)
        self.extend([seq], [k.shape[0]]).write(k, v, k_idx)

    def write(
        self,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_idx: torch.Tensor,
        layer: int = 0,
        *,
        trust_slots: bool = False,
    ) -> None:
        """Stores one row per slot (page * block_size + place in the page): :func:`openmsa.write_pages` into this layer's pages.

        A negative slot marks a padding row, which is left out. A slot beyond the pool is an error, which a GPU tells later; see there.

        :param slots: int64 [T]
        :param k: [T, Hkv, D]; v alike
        :param k_idx: [T, Di]
        :param trust_slots: skip the check of the slots on the CPU; a wrong one is then undefined behaviour
        """
        if not 0 <= layer < self.num_layers:
            raise InvalidArgumentError(f"layer is {layer}; this cache has layers 0 to {self.num_layers - 1}.", "layer")
        write_pages(k, v, k_idx, slots, self.k[layer], self.v[layer], self.k_idx[layer], trust_indices=trust_slots)

    def batch(self, seqs: Sequence[Hashable], seqlens_q: Sequence[int] | None = None) -> Batch:
        """The Batch of a step whose queries are the last ``seqlens_q[i]`` tokens of each sequence; by default one each (decode)."""
        held = [self._get(seq) for seq in seqs]
        seqlens_q = [1] * len(held) if seqlens_q is None else list(seqlens_q)
        if len(seqlens_q) != len(held):
            raise InvalidArgumentError(
                f"seqlens_q has {len(seqlens_q)} lengths for {len(held)} sequences; give one each.", "seqlens_q"
            )
        bound = max((sequence.length for sequence in held), default=0)
        _, fields = _upload(self._batch_fields(held, seqlens_q, bound), self.device)
        return _paged_batch(fields, max(seqlens_q, default=0), bound)

    def _batch_fields(self, held: list[_Sequence], seqlens_q: Sequence[int], max_seqlen: int) -> list[np.ndarray]:
        """cu_seqlens_q, seqlens_k, page_table, all int32; the table has columns for max_seqlen tokens."""
        page_table = np.full((len(held), max(self.config.num_blocks(max_seqlen), 1)), -1, dtype=np.int32)
        for row, sequence in zip(page_table, held):
            num_pages = self.config.num_blocks(sequence.length)
            row[:num_pages] = sequence.pages[:num_pages]
        cu_seqlens_q = np.concatenate(([0], np.cumsum(seqlens_q))).astype(np.int32)
        return [cu_seqlens_q, np.array([sequence.length for sequence in held], dtype=np.int32), page_table]

    def copy(self, seq: Hashable, new_seq: Hashable) -> None:
        """Starts ``new_seq`` with everything that ``seq`` holds. Pages are shared until one of the two writes to them."""
        source = self._get(seq)
        if new_seq in self._seqs:
            raise InvalidArgumentError(f"new_seq {new_seq!r} is held already; free() it first.", "new_seq")
        self._num_users[source.pages[: self.config.num_blocks(source.length)]] += 1
        self._seqs[new_seq] = _Sequence(source.pages.copy(), source.length)

    def crop(self, seq: Hashable, seqlen: int) -> None:
        """Forgets all but the first ``seqlen`` tokens, for instance the rejected ones of a speculative step."""
        sequence = self._get(seq)
        if not 0 <= seqlen <= sequence.length:
            raise InvalidArgumentError(f"seqlen is {seqlen}; {seq!r} holds {sequence.length} tokens, crop to 0 .. that.", "seqlen")
        kept, held = self.config.num_blocks(seqlen), self.config.num_blocks(sequence.length)
        self._release(sequence.pages[kept:held])
        sequence.length = seqlen

    def free(self, seq: Hashable) -> None:
        """Forgets a sequence; pages that no copy shares return to the pool."""
        self.crop(seq, 0)
        del self._seqs[seq]

    def gather(self, seq: Hashable, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A packed copy of what is held of a sequence: k and v [n, Hkv, D], k_idx [n, Di]."""
        sequence = self._get(seq)
        num_pages = self.config.num_blocks(sequence.length)
        pages = torch.from_numpy(sequence.pages[:num_pages].astype(np.int64)).to(self.device)
        k, v = (pool[layer][pages].transpose(1, 2).flatten(0, 1)[: sequence.length] for pool in (self.k, self.v))
        return k, v, self.k_idx[layer][pages].flatten(0, 1)[: sequence.length]

    def __repr__(self) -> str:
        used = self.num_pages - self.num_free_pages
        return f"PagedKvCache({len(self._seqs)} sequences, {used} of {self.num_pages} pages in use, {self.num_layers} layers, {self.dtype})"

    def _get(self, seq: Hashable) -> _Sequence:
        try:
            return self._seqs[seq]
        except KeyError:
            raise InvalidArgumentError(f"seq {seq!r} is not held by this cache.", "seq") from None

    def _shared_tail(self, sequence: _Sequence, num_leaving: int = 0) -> int | None:
        """The last page, if it has room but belongs to another sequence too: it must be copied before it is written."""
        if sequence.length % self.config.block_size == 0:
            return None
        page = int(sequence.pages[sequence.length // self.config.block_size])
        return page if self._num_users[page] - num_leaving > 1 else None

    def _require_pages(self, seqs: tuple[Hashable, ...], seqlens: list[int]) -> None:
        num_needed = 0
        num_leaving: dict[int, int] = {}  # copies of a shared tail page made earlier in this step
        for seq, n in zip(seqs, seqlens):
            length = self.seqlen(seq)
            num_needed += self.config.num_blocks(length + n) - self.config.num_blocks(length)
            sequence = self._seqs.get(seq)
            if n == 0 or sequence is None or length % self.config.block_size == 0:
                continue
            tail = int(sequence.pages[length // self.config.block_size])
            if self._shared_tail(sequence, num_leaving.get(tail, 0)) is not None:
                num_needed += 1
                num_leaving[tail] = num_leaving.get(tail, 0) + 1
        if num_needed > len(self._free):
            raise OutOfPagesError(
                f"num_pages is {self.num_pages}: the step needs {num_needed} more pages of {self.config.block_size} tokens, "
                f"{len(self._free)} are free. Free or crop sequences, or make a larger cache.",
                "num_pages",
            )

    def _grow(self, seq: Hashable, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Allocates pages for n more tokens and returns their (slots, positions). The pool has been checked to suffice."""
        block_size = self.config.block_size
        sequence = self._seqs.setdefault(seq, _Sequence(np.empty(0, dtype=np.int32)))
        if n > 0 and (tail := self._shared_tail(sequence)) is not None:
            own = self._take()
            for pool in (self.k, self.v, self.k_idx):
                pool[:, own] = pool[:, tail]
            self._num_users[tail] -= 1
            sequence.pages[sequence.length // block_size] = own
        first, last = self.config.num_blocks(sequence.length), self.config.num_blocks(sequence.length + n)
        if last > len(sequence.pages):
            grown = np.empty(max(last, 2 * len(sequence.pages)), dtype=np.int32)
            grown[:first] = sequence.pages[:first]
            sequence.pages = grown
        for i in range(first, last):
            sequence.pages[i] = self._take()
        positions = np.arange(sequence.length, sequence.length + n)
        sequence.length += n
        return sequence.pages[positions // block_size].astype(np.int64) * block_size + positions % block_size, positions

    def _take(self) -> int:
        page = self._free.pop()
        self._num_users[page] = 1
        return page

    def _release(self, pages: np.ndarray) -> None:
        for page in pages[::-1].tolist():  # the pool is a stack: the sequence's first page is the next to be used again
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                self._free.append(page)

    def _check_rows(self, num_rows: int, k: torch.Tensor, v: torch.Tensor, k_idx: torch.Tensor) -> None:
        """What write() would refuse, before a sequence has grown."""
        heads = (num_rows, self.config.num_kv_heads, self.config.head_dim)
        for name, tensor, shape in (("k", k, heads), ("v", v, heads), ("k_idx", k_idx, (num_rows, self.config.index_dim))):
            if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
                raise InvalidArgumentError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}; this cache takes {self.dtype} {list(shape)}.", name
                )
            if tensor.device != self.device:
                raise InvalidArgumentError(f"{name} lies on {tensor.device}, this cache on {self.device}; move one of them.", name)
