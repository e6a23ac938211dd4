"""Checks a backend against the fp64 oracle by the rules of docs/numerics.md, on any shapes. Behind `openmsa check`.

The backend computes the whole batch; the oracle, plain fp64 loops, recomputes only windows of query tokens where that is too
slow: the first and the last tokens of each sequence, block borders, and random places. A window is a batch of its own with q_start.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

import openmsa
from openmsa import ops

WINDOW = 8  # query tokens in a window
# fp64 multiply-adds the oracle may spend on one stage of one sequence before windows take the place of all queries.
ORACLE_BUDGET = 4_000_000_000
LSE_TOLERANCE = 1e-3
ABSOLUTE_TERM = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}


@dataclasses.dataclass
class Row:
    """One rule held against one stage."""

    backend: str
    layout: str
    stage: str
    rule: str
    measured: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.measured <= self.allowed  # False for NaN


@dataclasses.dataclass
class Case:
    """A batch of random inputs in the storage dtype."""

    config: openmsa.MsaConfig
    seqlens_q: list[int]
    seqlens_k: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_idx: torch.Tensor
    k_idx: torch.Tensor

    def query_begin(self, seq: int) -> int:
        return sum(self.seqlens_q[:seq])

    def key_begin(self, seq: int) -> int:
        return sum(self.seqlens_k[:seq])

    def first_position(self, seq: int) -> int:
        return self.seqlens_k[seq] - self.seqlens_q[seq]


@dataclasses.dataclass
class Window:
    """Query tokens [begin, end) of one sequence."""

    seq: int
    begin: int
    end: int


def make_case(config: openmsa.MsaConfig, seqlens_q: list[int], seqlens_k: list[int], dtype: torch.dtype, seed: int,
              integers: bool = False) -> Case:
    """Normal data, or small integers whose dot products are exact in every dtype (so that ties are real ties)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        if integers:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        return torch.randn(*shape, generator=generator).to(dtype)

    total_q, total_k = sum(seqlens_q), sum(seqlens_k)
    return Case(config, seqlens_q, seqlens_k, q=draw(total_q, config.num_q_heads, config.head_dim),
                k=draw(total_k, config.num_kv_heads, config.head_dim), v=draw(total_k, config.num_kv_heads, config.head_dim),
                q_idx=draw(total_q, config.num_kv_heads, config.index_dim), k_idx=draw(total_k, config.index_dim))


@dataclasses.dataclass
class Layout:
    """The case's keys as a backend gets them: packed, or in shuffled pages whose unused slots hold NaN."""

    name: str
    batch: openmsa.Batch
    k: torch.Tensor
    v: torch.Tensor
    k_idx: torch.Tensor


def packed_layout(case: Case) -> Layout:
    return Layout("packed", openmsa.Batch.packed(case.seqlens_q, case.seqlens_k), case.k, case.v, case.k_idx)


def paged_layout(case: Case, seed: int) -> Layout:
    size = case.config.block_size
    num_blocks = [-(-length // size) for length in case.seqlens_k]
    order = list(range(sum(num_blocks) + 1))  # one page that nobody owns
    random.Random(seed).shuffle(order)
    table = torch.full((len(num_blocks), max([1, *num_blocks])), -1, dtype=torch.int32)

    def empty_pages(*shape: int) -> torch.Tensor:
        return torch.full((len(order), *shape), math.nan, dtype=case.k.dtype)

    heads, dim = case.config.num_kv_heads, case.config.head_dim
    k, v = empty_pages(heads, size, dim), empty_pages(heads, size, dim)
    k_idx = empty_pages(size, case.config.index_dim)
    for seq, length in enumerate(case.seqlens_k):
        for block in range(num_blocks[seq]):
            page = order.pop()
            table[seq, block] = page
            live = min(size, length - block * size)
            rows = slice(case.key_begin(seq) + block * size, case.key_begin(seq) + block * size + live)
            k[page, :, :live] = case.k[rows].transpose(0, 1)
            v[page, :, :live] = case.v[rows].transpose(0, 1)
            k_idx[page, :live] = case.k_idx[rows]
    batch = openmsa.Batch(cu_seqlens_q=cumulative(case.seqlens_q), seqlens_k=torch.tensor(case.seqlens_k, dtype=torch.int32),
                          page_table=table)
    return Layout("paged", batch, k, v, k_idx)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def choose_windows(case: Case, seed: int) -> list[Window]:
    """All queries of a sequence if the oracle can afford them, else windows at both ends, at block borders and at random."""
    windows = []
    rng = random.Random(seed)
    for seq, length in enumerate(case.seqlens_q):
        cost_per_query = max(1, case.seqlens_k[seq]) * case.config.num_q_heads * case.config.head_dim * 2
        affordable = max(2 * WINDOW, ORACLE_BUDGET // cost_per_query)
        if length <= affordable:
            if length > 0:
                windows.append(Window(seq, 0, length))
            continue
        border = case.config.block_size - case.first_position(seq) % case.config.block_size - WINDOW // 2
        starts = [0, length - WINDOW, border, *(rng.randrange(length) for _ in range(8))]
        chosen: list[int] = []
        for start in starts[:affordable // WINDOW]:
            start = min(max(start, 0), length - WINDOW)
            if all(abs(start - other) >= WINDOW for other in chosen):
                chosen.append(start)
        windows.extend(Window(seq, start, start + WINDOW) for start in sorted(chosen))
    return windows


class Oracle:
    """fp64 results of the reference backend for one window, from the same rounded inputs."""

    def __init__(self, case: Case, window: Window):
        self._config = case.config
        queries = slice(case.query_begin(window.seq) + window.begin, case.query_begin(window.seq) + window.end)
        keys = slice(case.key_begin(window.seq), case.key_begin(window.seq) + case.seqlens_k[window.seq])
        self.queries = queries
        self.q, self.q_idx = case.q[queries].double(), case.q_idx[queries].double()
        self.k, self.v, self.k_idx = case.k[keys].double(), case.v[keys].double(), case.k_idx[keys].double()
        self.positions = torch.arange(window.begin, window.end) + case.first_position(window.seq)
        self._batch = openmsa.Batch(cu_seqlens_q=cumulative([window.end - window.begin]),
                                    cu_seqlens_k=cumulative([case.seqlens_k[window.seq]]),
                                    q_start=self.positions[:1].to(torch.int32))

    def block_scores(self) -> torch.Tensor:
        return openmsa.block_scores(self.q_idx, self.k_idx, self._batch, self._config, backend="reference")

    def index_select(self) -> torch.Tensor:
        return openmsa.index_select(self.q_idx, self.k_idx, self._batch, self._config, backend="reference")

    def sparse(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return openmsa.sparse_attention(self.q, self.k, self.v, block_ids, self._batch, self._config, return_lse=True,
                                        backend="reference")

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return openmsa.dense_attention(self.q, self.k, self.v, self._batch, self._config, return_lse=True, return_block_max=True,
                                       backend="reference")

    def score_bound(self) -> torch.Tensor:
        """[queries, Hkv, 1]: what fp32 sums in any order may be off by: Di * 2^-24 * |q_idx| * max |k_idx|."""
        longest_key = self.k_idx.norm(dim=-1).max() if self.k_idx.numel() else torch.tensor(0.0)
        return self._config.index_dim * 2.0**-24 * self.q_idx.norm(dim=-1, keepdim=True) * longest_key

    def plain_error(self, expected: torch.Tensor, block_ids: torch.Tensor | None, dtype: torch.dtype) -> float:
        """Error of the obvious PyTorch computation in the storage dtype: the yardstick for attention."""
        config, num_keys = self._config, self.k.shape[0]
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        key_positions = torch.arange(num_keys)
        rows_at_once = max(1, (1 << 23) // max(1, config.num_q_heads * num_keys))
        worst = 0.0
        for first in range(0, q.shape[0], rows_at_once):
            rows = slice(first, first + rows_at_once)
            visible = (key_positions <= self.positions[rows, None])[:, None].expand(-1, config.num_kv_heads, -1)
            if block_ids is not None:
                ids = block_ids[rows].long()
                num_blocks = -(-num_keys // config.block_size)
                # One extra column takes the -1 entries.
                chosen = torch.zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool)
                chosen.scatter_(2, torch.where(ids < 0, num_blocks, ids), True)
                visible = visible & chosen[..., key_positions // config.block_size]
            visible = visible.unsqueeze(2)
            grouped = q[rows].unflatten(1, (config.num_kv_heads, config.group_size))
            scores = torch.einsum("tgnd,sgd->tgns", grouped, k) * config.effective_softmax_scale
            weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
            weights = torch.where(visible.any(dim=-1, keepdim=True), weights, torch.zeros_like(weights))
            out = torch.einsum("tgns,sgd->tgnd", weights, v).flatten(1, 2)
            worst = max(worst, largest((out.double() - expected[rows]).abs()))
        return worst


def largest(values: torch.Tensor) -> float:
    """Maximum that lets NaN through, 0 for nothing."""
    return values.max().item() if values.numel() else 0.0


def difference(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|got - expected| in fp64; equal infinities differ by 0, any other pairing with an infinity by infinity or NaN."""
    got, expected = got.double(), expected.double()
    return torch.where(got == expected, torch.zeros_like(got), (got - expected).abs())


def selection_fault(block_ids: torch.Tensor, oracle: Oracle, scores: torch.Tensor, config: openmsa.MsaConfig) -> float:
    """How far the selection is from right, in units of score beyond the bound 2e (<= 0: right); infinity if a list is malformed."""
    worst = -math.inf
    bound = 2 * oracle.score_bound()
    for row, position in enumerate(oracle.positions.tolist()):
        num_visible = min(position + 1, oracle.k.shape[0])
        num_blocks = max(0, -(-num_visible // config.block_size))
        own = num_blocks - 1
        forced = {b for b in range(num_blocks) if b < config.num_init_blocks or own - config.num_local_blocks < b <= own}
        for group in range(config.num_kv_heads):
            ids = [b for b in block_ids[row, group].tolist()]
            chosen = [b for b in ids if b >= 0]
            wrong = (ids != chosen + [-1] * (len(ids) - len(chosen)) or chosen != sorted(set(chosen))
                     or len(chosen) != min(num_blocks, config.top_k) or any(b >= num_blocks for b in chosen)
                     or not forced <= set(chosen))
            if wrong:
                return math.inf
            free = [b for b in chosen if b not in forced]
            left = sorted(set(range(num_blocks)) - set(chosen))
            if free and left:
                row_scores = scores[row, group]
                gap = (row_scores[left].max() - row_scores[free].min()).item()
                worst = max(worst, gap - bound[row, group, 0].item())
    return max(worst, 0.0)


def run_on(backend: str, stage: str, *args: Any, **options: Any) -> Any:
    """One operator by one backend, from and to the CPU: a GPU backend gets copies, and its checks on the device are asked for."""
    function = getattr(openmsa, stage)
    if backend != "cuda":
        return function(*args, backend=backend, **options)
    result = function(*(x.to("cuda") if isinstance(x, (torch.Tensor, openmsa.Batch)) else x for x in args), backend=backend, **options)
    openmsa.synchronize("cuda")
    return result.cpu() if isinstance(result, torch.Tensor) else tuple(x.cpu() for x in result)


def check_backend(case: Case, exact_case: Case, backend: str, seed: int, stage_done: Callable[[str], None]) -> Iterator[Row]:
    """Every stage of one backend, packed and paged. `exact_case` has integer data and the same lengths."""
    windows = choose_windows(case, seed)
    oracles = [Oracle(case, window) for window in windows]
    scores = [oracle.block_scores() for oracle in oracles]
    dense = [oracle.dense() for oracle in oracles]
    stage_done("oracle")
    for layout in (packed_layout(case), paged_layout(case, seed)):
        yield from _check_layout(case, layout, oracles, scores, dense, backend)
        stage_done(f"{backend}, {layout.name}")
    exact_oracles = [Oracle(exact_case, window) for window in windows]
    for layout in (packed_layout(exact_case), paged_layout(exact_case, seed)):
        ids = run_on(backend, "index_select", exact_case.q_idx, layout.k_idx, layout.batch, case.config)
        wrong = sum((ids[o.queries] != o.index_select()).any(dim=-1).sum().item() for o in exact_oracles)
        yield Row(backend, layout.name, "index_select", "exact data: lists that differ", wrong, 0)
    stage_done(f"{backend}, exact data")


def _check_layout(case: Case, layout: Layout, oracles: list[Oracle], scores: list[torch.Tensor], dense: list[Any],
                  backend: str) -> Iterator[Row]:
    config, batch, dtype = case.config, layout.batch, case.q.dtype

    def row(stage: str, rule: str, measured: float, allowed: float) -> Row:
        return Row(backend, layout.name, stage, rule, measured, allowed)

    def attention_rows(stage: str, out: torch.Tensor, lse: torch.Tensor, expected: list[Any], block_ids: torch.Tensor | None,
                       rows_of: Callable[[Oracle], slice]) -> Iterator[Row]:
        error = max((largest(difference(out[rows_of(o)], e[0])) for o, e in zip(oracles, expected, strict=True)), default=0.0)
        plain = max((o.plain_error(e[0], None if block_ids is None else block_ids[o.queries], dtype)
                     for o, e in zip(oracles, expected, strict=True)), default=0.0)
        yield row(stage, "out: error <= 2 x plain PyTorch + absolute", error, 2 * plain + ABSOLUTE_TERM[dtype])
        error = max((largest(difference(lse[rows_of(o)], e[1])) for o, e in zip(oracles, expected, strict=True)), default=0.0)
        yield row(stage, "lse: error", error, LSE_TOLERANCE)

    got = run_on(backend, "block_scores", case.q_idx, layout.k_idx, batch, config)
    excess = 0.0
    for oracle, expected in zip(oracles, scores, strict=True):
        part = got[oracle.queries, :, :expected.shape[-1]]
        excess = max(excess, largest(difference(part, expected) - oracle.score_bound()))
    yield row("block_scores", "error beyond the fp32 bound", excess, 0)

    ids = run_on(backend, "select_blocks", got, batch, config)
    expected_ids = openmsa.select_blocks(got, batch, config, backend="reference")
    yield row("select_blocks", "lists that differ from the oracle's", (ids != expected_ids).any(dim=-1).sum().item(), 0)

    ids = run_on(backend, "index_select", case.q_idx, layout.k_idx, batch, config)
    fault = max((selection_fault(ids[o.queries], o, s, config) for o, s in zip(oracles, scores, strict=True)), default=0.0)
    yield row("index_select", "wrong choice beyond the bound 2e", fault, 0)

    sparse = [oracle.sparse(ids[oracle.queries]) for oracle in oracles]
    for stage in ("sparse_attention", "sparse_decode"):
        out, lse = run_on(backend, stage, case.q, layout.k, layout.v, ids, batch, config, return_lse=True)
        yield from attention_rows(stage, out, lse, sparse, ids, lambda o: o.queries)
        again = run_on(backend, stage, case.q, layout.k, layout.v, ids, batch, config, num_threads=3)
        rule = "rows not bitwise equal " + ("when run again" if backend == "cuda" else "with 3 threads")
        yield row(stage, rule, (again != out).any(dim=-1).sum().item(), 0)

    if max(case.seqlens_q, default=0) <= (ops.MAX_DECODE_QUERIES_CUDA if backend == "cuda" else ops.MAX_DECODE_QUERIES):
        # For few queries it is a kernel of its own, which selects by itself.
        out, lse, ids = run_on(backend, "msa_attention", case.q, layout.k, layout.v, case.q_idx, layout.k_idx, batch, config,
                               return_lse=True, return_block_ids=True)
        fault = max((selection_fault(ids[o.queries], o, s, config) for o, s in zip(oracles, scores, strict=True)), default=0.0)
        yield row("msa_attention", "wrong choice beyond the bound 2e", fault, 0)
        expected = [oracle.sparse(ids[oracle.queries]) for oracle in oracles]
        yield from attention_rows("msa_attention", out, lse, expected, ids, lambda o: o.queries)

    out, lse, block_max = run_on(backend, "dense_attention", case.q, layout.k, layout.v, batch, config, return_lse=True,
                                 return_block_max=True)
    yield from attention_rows("dense_attention", out, lse, dense, None, lambda o: o.queries)
    excess = 0.0
    for oracle, expected in zip(oracles, dense, strict=True):
        part = block_max[oracle.queries, :, :expected[2].shape[-1]]
        bound = config.effective_softmax_scale * config.head_dim * 2.0**-23 * oracle.q.norm(dim=-1, keepdim=True) * (
            oracle.k.norm(dim=-1).max() if oracle.k.numel() else 0.0)
        excess = max(excess, largest(difference(part, expected[2]) - bound))
    yield row("dense_attention", "block_max: error beyond the fp32 bound", excess, 0)
