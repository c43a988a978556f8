"""Aligned kernels: one function per operation, called by the rollout engine and by the learner alike.

`--kernels aligned` makes the log-probability that vLLM records while decoding and the one that the learner computes in
its training forward the same to the last bit. Two things are needed, and this file is those two things:

1. *The same function on both sides.* Every leaf operation of a decoder (linear, RMSNorm, rotary embedding, SwiGLU,
   attention, log-softmax) is computed by one function here or by one C++ operator of vLLM that both sides call.
2. *Row invariance.* A token's result must not depend on which other tokens share its batch: rollout decodes one token
   of many sequences at a time, the learner scores whole sequences at once. Each function says how it gets there.

Notation: T packed tokens, B sequences, H query heads, K key/value heads, D head size, V vocabulary.

The engine's side is installed by `engine_kernels(...)` around the construction of `vllm.LLM`, the learner's side is
`hidden_states(...)` and `token_logprobs(...)`, which walk an ordinary transformers model: parameters, names and
configuration stay transformers' own. Written against vLLM 0.32.0; the files relied on are named where they are used.
On CUDA the forward passes are the engine's own (kernels_cuda.py); the backward passes here serve both.

`python kernels.py --model M` runs the alignment checks C0 to C10 (checks.py).
"""

import contextlib
import ctypes
import functools
import os
import threading
from dataclasses import dataclass

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch; run_async.py says why
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import kernels_cuda
import kernels_moe

ROWS = 16  # linear layers see a multiple of this many rows; see `linear`
BLOCK = 128  # tokens per KV-cache block, on both sides (vLLM's default on CPUs, vllm/platforms/cpu.py)
CORES = os.cpu_count() or 1
SUPPORTED = {"llama", "qwen2", "qwen3", "qwen3_moe"}  # transformers' config.model_type
OPERATIONS = "embedding, linear, RMSNorm, q/k RMSNorm, rotary embedding, causal attention, SwiGLU, log-softmax"

# vLLM's CPU attention works in one scratch buffer per process (csrc/cpu: ScratchPadManager). Two threads in it at once
# give NaN or wrong numbers without an error, so the rollout thread and the learner take turns.
ATTENTION_LOCK = threading.Lock()


def load_ops() -> None:
    """Register vLLM's C++ operators (torch.ops._C), which importing the platform does; quiet and idempotent."""
    import vllm._custom_ops  # noqa: F401


def keep_freed_memory() -> None:
    """Let the allocator keep what is freed. By default glibc returns every large tensor to the system at once, and the
    next one of its size is paged in anew: a quarter of an update on SmolLM2-135M, a tenth on the base model."""
    with contextlib.suppress(OSError, AttributeError):  # another C library: no harm, only slower
        libc = ctypes.CDLL("libc.so.6")
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(option, 2**31 - 1)


def return_freed_memory() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def require_supported(config, device="cpu") -> None:
    """Raise ValueError with one line unless every leaf operation of the architecture has an aligned version."""
    missing = None
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    experts = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
    if not hasattr(config, "rms_norm_eps"):
        missing = "LayerNorm"
    elif experts and (config.model_type != "qwen3_moe" or device != "cpu"):
        missing = "mixture-of-experts routing" + " on CUDA" * (device != "cpu")
    elif activation != "silu":
        missing = f"activation {activation}"
    elif getattr(config, "use_sliding_window", False):
        missing = "sliding-window attention"
    elif config.model_type not in SUPPORTED:
        missing = "its decoder layer"
    if missing:
        raise ValueError(
            f"model type {config.model_type!r}: {missing} has no aligned version; those that have: {OPERATIONS} (model types "
            f"{', '.join(sorted(SUPPORTED))}); choose another --model, or train with --kernels standard"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Leaf operations, used by both sides


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] @ weight [out, in].T + bias, with rows padded by zeros to a multiple of 16.

    BLAS picks its kernel by shape, so F.linear at 1, 2, 3 or 5 rows rounds differently from the same row in a larger
    batch. At multiples of 16 rows the bits did not depend on the row count (16 to 7,504), on one or two threads, nor on
    whether q/k/v or gate/up are one matrix (check C3).
    """
    if x.is_cuda:
        return kernels_cuda.Linear.apply(x, weight, bias)
    rows = x.shape[0]
    if pad := -rows % ROWS:
        return F.linear(F.pad(x, (0, 0, 0, pad)), weight, bias)[:rows]
    return F.linear(x, weight, bias)


class RMSNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, eq. 4), one row at a time.

    The forward on CPUs is vLLM's C++ operator, in which a row is summed by one thread in a fixed order.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()  # the operator does not look at strides
        if x.is_cuda:
            y = kernels_cuda.rms_norm(x, weight, eps)
        else:
            y = torch.empty_like(x)
            torch.ops._C.rms_norm(y, x, weight, eps)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx, dweight = _rms_norm_backward(dy, x, weight, ctx.eps)
        return dx.to(x.dtype), dweight, None


class AddRMSNorm(torch.autograd.Function):
    """(x, residual) -> (RMSNorm(x + residual), x + residual), with the mean square taken of the unrounded sum."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        y, total = x.clone(), residual.clone()
        torch.ops._C.fused_add_rms_norm(y, total, weight, eps)  # in place: y, rounded sum
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return y, total

    @staticmethod
    def backward(ctx, dy, dtotal):
        total, weight = ctx.saved_tensors
        dx, dweight = _rms_norm_backward(dy, total, weight, ctx.eps)
        dx = dx.add_(dtotal).to(total.dtype)
        return dx, dx, dweight, None


def _rms_norm_backward(dy, x, weight, eps):
    """Gradients of RMSNorm in float32, dx = r (g - n mean(g n)) and dweight = sum(dy n), with r the inverse root mean
    square, n = r x and g = dy weight. Rows are taken in pieces that stay in the cache: it is memory that limits this."""
    width = x.shape[-1]
    dx = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    dweight = torch.zeros(width, device=x.device)
    weight_f = weight.float()
    pieces = (t.reshape(-1, width).split(max(1, (2**26 if x.is_cuda else 2**20) // width)) for t in (dy, x, dx))
    for dy_, x_, out in zip(*pieces):
        x_ = x_.float()
        r = torch.linalg.vector_norm(x_, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        n, dy_ = x_ * r, dy_.float()
        dn = dy_ * n
        dweight += dn.sum(0)
        mean = dn.mv(weight_f).div_(-width)  # of -g n; `@` with a vector is refused by batch-invariant matmul on CUDA
        torch.addcmul(dy_ * weight_f, n, mean[:, None], out=out)
        out.mul_(r)
    return dx, dweight.to(weight.dtype)


class Rotary(torch.autograd.Function):
    """Rotary position embedding (Su et al. 2021) on q [T, H*D] and k [T, K*D] with vLLM's operator and its table."""

    @staticmethod
    def forward(ctx, q, k, positions, cos_sin, head_dim):
        q, k = q.clone(memory_format=torch.contiguous_format), k.clone(memory_format=torch.contiguous_format)
        torch.ops._C.rotary_embedding(positions, q, k, head_dim, cos_sin, True)
        ctx.save_for_backward(positions, cos_sin)
        ctx.head_dim = head_dim
        return q, k

    @staticmethod
    def backward(ctx, dq, dk):
        positions, cos_sin = ctx.saved_tensors
        dq, dk = dq.clone(memory_format=torch.contiguous_format), dk.clone(memory_format=torch.contiguous_format)
        inverse = cos_sin.clone()  # rotating back: the sine's sign turned (the operator's own inverse is not there on CPUs)
        inverse[:, inverse.shape[1] // 2 :].neg_()
        torch.ops._C.rotary_embedding(positions, dq, dk, ctx.head_dim, inverse, True)
        return dq, dk, None, None, None


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [rows, 2 * intermediate] (Shazeer 2020), each step rounded to the model's dtype.

    torch cuts an elementwise operation into one piece per thread and computes what does not fill a vector by a scalar
    exp that can differ in the last bit. With an intermediate size that is a multiple of 128 and at most two threads the
    cuts fall on whole vectors; otherwise vLLM's C++ operator, which works row by row, is used (2.3 times slower). On CUDA
    the engine calls that operator too.
    """
    width = gate_up.shape[-1] // 2
    if width % 128 == 0 and CORES <= 2 and not gate_up.is_cuda:
        return F.silu(gate_up[..., :width]) * gate_up[..., width:]
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    torch.ops._C.silu_and_mul(out, gate_up)
    return out


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return swiglu(gate_up)

    @staticmethod
    def backward(ctx, dout):
        return swiglu_backward(dout, *ctx.saved_tensors)


def swiglu_backward(dout, gate_up):
    grad = torch.empty_like(gate_up)
    (gate, up), (dgate, dup) = gate_up.chunk(2, dim=-1), grad.chunk(2, dim=-1)
    torch.mul(dout, F.silu(gate), out=dup)
    torch.ops.aten.silu_backward(dout * up, gate, grad_input=dgate)
    return grad


# ---------------------------------------------------------------------------------------------------------------------
# Attention: every query token is its own one-token request


def _attention_rows(q, key_cache, value_cache, out, row_lens, block_table, metadata, scale):
    """Paged attention in which row t attends to the first row_lens[t] tokens of its own block-table row."""
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)  # one query token per request
    torch.ops._C.cpu_attention_with_kv_cache(
        q, key_cache, value_cache, out, starts, row_lens, scale, True, None, -1, block_table, 0.0, metadata, None, None
    )


def _row_metadata(row_lens, H, K, D, dtype, isa):
    """The operator's work plan for one-token requests, KV splitting off: a split would change the summation order."""
    starts = torch.arange(row_lens.shape[0] + 1, dtype=torch.int32)
    return torch.ops._C.get_scheduler_metadata(
        row_lens.shape[0], H, K, D, row_lens, dtype, starts, True, -1, isa, False, None
    )


def _isa(dtype, head_dim) -> str:
    """The instruction set that the engine's attention uses, from vllm/v1/attention/backends/cpu_attn.py."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, BLOCK, head_dim, "auto")


@dataclass
class Packed:
    """Sequences laid end to end, without padding between them, and what attention needs to keep them apart.

    The token dimension is padded once to T, a multiple of 16, so that every linear layer sees whole groups of rows.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, from 0 in each sequence
    tokens: int  # real tokens; input_ids beyond them are padding
    lengths: list[int]  # tokens per sequence
    row_lens: torch.Tensor  # [tokens] int32, position + 1; on CUDA [B], the sequence's length
    block_table: torch.Tensor  # [tokens, blocks] int32: the scratch-cache blocks of the row's sequence; on CUDA [B, blocks]
    starts: torch.Tensor | None  # on CUDA: [B + 1] int32, where each sequence starts, and the end
    slots: torch.Tensor  # [tokens] int64: where the token's key and value lie in the scratch cache
    blocks: int  # scratch-cache blocks in all
    groups: list[torch.Tensor]  # for the backward: [b, L] int64 token indices of sequences of like length, -1 = none


def pack(sequences: list[list[int]], device="cpu", rows: bool | None = None) -> Packed:
    """Lay token-id sequences end to end; the order is kept. rows: attention takes every token as a request of its own, as
    it must on CPUs (the default there), and not every sequence."""
    rows = torch.device(device).type == "cpu" if rows is None else rows
    block = BLOCK if rows else kernels_cuda.BLOCK
    lengths = [len(s) for s in sequences]
    tokens = sum(lengths)
    pad = -tokens % ROWS
    flat = [token for s in sequences for token in s]
    sizes = torch.tensor(lengths)
    start = torch.cumsum(sizes, 0) - sizes  # [B] first token of each sequence
    owner = torch.repeat_interleave(torch.arange(len(lengths)), sizes)  # [tokens]
    positions = torch.arange(tokens) - start[owner]
    blocks = (sizes + block - 1) // block  # [B]
    first = torch.cumsum(blocks, 0) - blocks
    table = (first[:, None] + torch.arange(int(blocks.max()))).to(torch.int32)  # entries past a sequence's end: unread
    table.clamp_(max=int(blocks.sum()) - 1)

    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    groups, members = [], []
    for i in order:  # bound both the padding (a quarter) and the size of a group's [b, L, L] score matrices
        if members and (lengths[i] > 1.25 * lengths[members[0]] + 8 or (len(members) + 1) * lengths[i] ** 2 > 2**20):
            groups.append(members)
            members = []
        members.append(i)
    groups.append(members)
    indices = []
    for members in groups:
        longest = torch.arange(lengths[members[-1]])
        member = torch.tensor(members)
        indices.append(torch.where(longest < sizes[member, None], start[member, None] + longest, -1))

    return Packed(
        input_ids=torch.tensor(flat + [0] * pad, device=device),
        positions=F.pad(positions, (0, pad)).to(device),
        tokens=tokens,
        lengths=lengths,
        row_lens=(positions + 1 if rows else sizes).to(device, torch.int32),
        block_table=(table[owner] if rows else table).to(device),
        starts=None if rows else F.pad(torch.cumsum(sizes, 0), (1, 0)).to(device, torch.int32),
        slots=(first[owner] * block + positions).to(device),
        blocks=int(blocks.sum()),
        groups=[index.to(device) for index in indices],
    )


class Attention(torch.autograd.Function):
    """Causal attention (Vaswani et al. 2017, eq. 1) over packed sequences: q [T, H*D], k and v [T, K*D] -> [T, H*D].

    Forward on CPUs: vLLM's paged attention over a scratch KV cache, every query token as a request of its own. Called that
    way a token's bits are the same in decode, prefill, chunked prefill and in any batch (check C6); called the stock
    way they are not. Backward: the explicit formula on batched matmuls, recomputing the probabilities; it need not
    equal the forward's bits, only itself from run to run.
    """

    @staticmethod
    def forward(ctx, q, k, v, packed: Packed, head_dim, metadata, isa):
        T, n = q.shape[0], packed.tokens
        q, k, v = (x.reshape(T, -1, head_dim) for x in (q, k, v))
        if q.is_cuda:
            out = kernels_cuda.attention(q, k, v, packed)
        else:
            # vLLM's cache layout: [blocks, K, 2 * BLOCK, D], keys in the first half of each block, values in the second.
            # Zeros: a block is read to its end, and what was never written, times probability 0, is NaN if it is not finite.
            cache = q.new_zeros(packed.blocks, k.shape[1], 2 * BLOCK, head_dim)
            keys, values = cache.chunk(2, dim=2)
            out = torch.zeros_like(q)
            with ATTENTION_LOCK:
                torch.ops._C.cpu_attn_reshape_and_cache(k[:n], v[:n], keys, values, packed.slots, isa)
                _attention_rows(
                    q[:n], keys, values, out[:n], packed.row_lens, packed.block_table, metadata, head_dim**-0.5
                )
        ctx.save_for_backward(q, k, v, out)
        ctx.packed = packed
        return out.view(T, -1)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out = ctx.saved_tensors
        T, H, D = q.shape
        K, G, scale, dtype = k.shape[1], H // k.shape[1], D**-0.5, q.dtype
        dout = dout.reshape(T, H, D)
        delta = (dout.float() * out).sum(-1, keepdim=True)  # [T, H, 1], the softmax's own term (Dao et al. 2022, app. B.2)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for index in ctx.packed.groups:  # [b, L]
            b, L = index.shape
            real = index >= 0
            take, at = index.clamp(min=0), index[real]

            def rows(x, heads):  # [T, K * heads, n] -> [b * K, heads * L, n]: the query heads of a key head side by side
                return x[take].view(b, L, K, heads, -1).permute(0, 2, 3, 1, 4).reshape(b * K, heads * L, -1)

            def put(grad, x, heads):
                grad[at] = x.view(b, K, heads, L, D).permute(0, 3, 1, 2, 4).reshape(b, L, K * heads, D)[real]

            qb, kb, vb, db, delta_b = rows(q, G), rows(k, 1), rows(v, 1), rows(dout, G), rows(delta, G)
            if len(at) < b * L:  # a padded query must not reach the keys' and values' gradients
                keep = real[:, None, None, :, None].expand(b, K, G, L, 1).reshape(b * K, G * L, 1)
                db, delta_b = db * keep, delta_b * keep
            # padding only follows the real tokens, so causality hides it too
            future = torch.full((L, L), float("-inf"), dtype=dtype, device=q.device).triu_(1).repeat(G, 1)
            scores = torch.baddbmm(future.expand(b * K, G * L, L), qb, kb.transpose(1, 2), alpha=scale)
            p = torch.softmax(scores, -1, dtype=torch.float32)  # [b * K, G * L, L]
            put(dv, torch.bmm(p.to(dtype).transpose(1, 2), db), 1)
            ds = torch.bmm(db, vb.transpose(1, 2)).sub(delta_b).mul_(p).to(dtype)
            put(dq, torch.bmm(ds, kb).mul_(scale), G)
            put(dk, torch.bmm(ds.transpose(1, 2), qb).mul_(scale), 1)
        return dq.view(T, -1), dk.view(T, -1), dv.view(T, -1), None, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# The learner's forward: a transformers model, walked layer by layer with the operations above


def rotary_table(config, dtype, device="cpu") -> torch.Tensor:
    """vLLM's cos/sin table [max_position, D] in the model's dtype, from the function that the engine builds it with, and
    on its device: another one's cosine rounds differently."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.transformers_utils.config import set_default_rope_theta

    if getattr(config, "rope_parameters", None) is None:
        set_default_rope_theta(config, default_theta=10000)
    # get_rope keeps the modules it made. One made here, without the engine's configuration, would fall back to another
    # implementation and then be handed to the engine: make it, take its table, and put the cache back.
    cache, rotary_embedding._ROPE_DICT = rotary_embedding._ROPE_DICT, {}
    try:
        with set_current_vllm_config(VllmConfig()), torch.device(device):
            rope = rotary_embedding.get_rope(
                head_size(config), config.max_position_embeddings, rope_parameters=config.rope_parameters, dtype=dtype
            )
    finally:
        rotary_embedding._ROPE_DICT = cache
    return rope.cos_sin_cache.to(dtype)


def head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _merged(*layers):
    """Weights (and biases) of several linear layers as one matrix, as the engine holds them: one matmul, not three."""
    weight = torch.cat([layer.weight for layer in layers])
    return weight, torch.cat([layer.bias for layer in layers]) if layers[0].bias is not None else None


def _decoder_layer(layer, x, residual, packed, cos_sin, metadata, isa, trace=None):
    """One pre-norm decoder block; `trace(op, tensor)` sees each operation's output (for the locator in checks.py)."""
    trace = trace or (lambda op, tensor: None)
    attn, mlp, D = layer.self_attn, layer.mlp, layer.self_attn.head_dim
    x, residual = _add_norm(x, residual, layer.input_layernorm)
    trace("input residual", residual)
    trace("input norm", x)
    qkv = linear(x, *_merged(attn.q_proj, attn.k_proj, attn.v_proj))
    trace("q/k/v", qkv)
    q, k, v = qkv.split([p.out_features for p in (attn.q_proj, attn.k_proj, attn.v_proj)], dim=-1)
    if hasattr(attn, "q_norm"):  # Qwen3
        q, k = (
            RMSNorm.apply(h.reshape(-1, D), norm.weight, norm.variance_epsilon).view(h.shape)
            for h, norm in ((q, attn.q_norm), (k, attn.k_norm))
        )
        trace("q/k norm", torch.cat([q, k], -1))
    q, k = Rotary.apply(q, k, packed.positions, cos_sin, D)
    trace("rotary", torch.cat([q, k], -1))
    x = Attention.apply(q, k, v.contiguous(), packed, D, metadata, isa)
    trace("attention", x)
    x = linear(x, attn.o_proj.weight, attn.o_proj.bias)
    trace("o_proj", x)
    x, residual = _add_norm(x, residual, layer.post_attention_layernorm)
    trace("residual", residual)
    trace("post-attention norm", x)
    if hasattr(mlp, "experts"):
        return kernels_moe.block(mlp, x, trace), residual
    x = linear(x, *_merged(mlp.gate_proj, mlp.up_proj))
    trace("gate/up", x)
    x = SwiGLU.apply(x)
    trace("activation", x)
    x = linear(x, mlp.down_proj.weight, mlp.down_proj.bias)
    trace("down", x)
    return x, residual


def _add_norm(x, residual, norm):
    if residual is None:
        return RMSNorm.apply(x, norm.weight, norm.variance_epsilon), x
    return AddRMSNorm.apply(x, residual, norm.weight, norm.variance_epsilon)


def hidden_states(model, packed: Packed, cos_sin, gradient_checkpointing: bool = False, trace=None) -> torch.Tensor:
    """Final hidden states [T, hidden] of a transformers causal LM (Llama, Qwen2 or Qwen3) over packed sequences."""
    config, dtype, D = model.config, model.dtype, head_size(model.config)
    metadata = isa = None
    if not packed.input_ids.is_cuda:
        isa = _isa(dtype, D)
        with ATTENTION_LOCK:  # the plan is laid out in the same scratch buffer
            metadata = _row_metadata(packed.row_lens, config.num_attention_heads, config.num_key_value_heads, D, dtype, isa)
    x, residual = F.embedding(packed.input_ids, model.model.embed_tokens.weight), None
    if trace:
        trace("embedding", x)
    for i, layer in enumerate(model.model.layers):
        at = (lambda op, t, i=i: trace(f"layers.{i}.{op}", t)) if trace else None
        # learn_fsdp.py registers `aligned_forward`, for FSDP to gather the layer's weights around
        forward = getattr(layer, "aligned_forward", functools.partial(_decoder_layer, layer))
        if gradient_checkpointing and torch.is_grad_enabled():
            x, residual = checkpoint(forward, x, residual, packed, cos_sin, metadata, isa, use_reentrant=False)
        else:
            x, residual = forward(x, residual, packed, cos_sin, metadata, isa, at)
    x, residual = _add_norm(x, residual, model.model.norm)
    if trace:
        trace("final residual", residual)
        trace("final norm", x)
    return x


class TokenLogprobs(torch.autograd.Function):
    """Log-probabilities of given tokens without ever holding [T, V]: (log pi [N], entropy [N]), both float32.

    hidden [N, hidden], weight [V, hidden], targets [N] int64. Logits are rounded to the model's dtype, divided by the
    temperature and log-softmaxed in float32, row by row, as vLLM's sampler does with logprobs_mode=processed_logprobs
    (vllm/v1/sample/ops/topk_topp_sampler.py; on CUDA kernels_cuda.py). The backward recomputes them chunk by chunk. Entropy
    carries no gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):
        logprobs, entropies, normalizers = [], [], []
        for a, b in _chunks(weight.shape[0], hidden.shape[0], hidden.is_cuda):
            raw = head_logits(hidden[a:b], weight, bias)
            logits = tempered(raw, temperature)
            logp = torch.log_softmax(logits, dim=-1)
            at = targets[a:b, None]
            logprobs.append((kernels_cuda.token_logprobs(raw, logits, at, temperature) if logits.is_cuda else logp.gather(1, at))[:, 0])
            normalizers.append(logits.gather(1, at)[:, 0] - logprobs[-1])
            p, logp = torch.exp(logp, out=logits), logp.clamp_(min=-1e4)  # 0 log 0 = 0
            # batch-invariant bmm on CUDA computes tiles of 128 x 128, of which this would use one element
            entropies.append(-(p.mul_(logp).sum(-1) if p.is_cuda else torch.bmm(p[:, None], logp[:, :, None])[:, 0, 0]))
        logprobs, entropy = torch.cat(logprobs), torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(normalizers))
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, dlogprobs, _):
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for a, b in _chunks(weight.shape[0], hidden.shape[0], hidden.is_cuda):
            g = dlogprobs[a:b, None] / ctx.temperature
            p = tempered(head_logits(hidden[a:b], weight, bias), ctx.temperature).sub_(normalizer[a:b, None]).exp_()
            dlogits = p.mul_(-g).scatter_add_(1, targets[a:b, None], g)
            if bias is not None:
                dbias += dlogits.sum(0)
            dlogits = dlogits.to(hidden.dtype)
            dhidden[a:b] = dlogits @ weight
            dweight += dlogits.t() @ hidden[a:b]
        return dhidden, dweight.to(weight.dtype), dbias if bias is None else dbias.to(bias.dtype), None, None


def head_logits(hidden, weight, bias):
    """[rows, V] in the model's dtype. On CUDA of a vocabulary padded to a multiple of 64, as the engine's is: the matrix' shape
    decides the tiles, and how far rows lie apart decides how the log-softmax kernel reads them."""
    vocab = weight.shape[0]
    if hidden.is_cuda and (pad := -vocab % 64):
        weight, bias = F.pad(weight, (0, 0, 0, pad)), None if bias is None else F.pad(bias, (0, pad))
    return linear(hidden, weight, bias)[:, :vocab]


def tempered(logits, temperature):
    """[rows, V] float32: divided by the temperature."""
    logits = logits.to(torch.float32, copy=logits.is_cuda)
    if temperature != 1.0 and logits.is_cuda:
        kernels_cuda.apply_temperature(logits, temperature)
    elif temperature != 1.0:  # divided by a tensor, as vLLM does; dividing by a number need not round the same way
        logits /= torch.full((logits.shape[0], 1), temperature)
    return logits


def _chunks(vocab, rows, cuda=False, elements=None):
    elements = elements or (2**27 if cuda else 2**23)
    size = max(ROWS, elements // vocab // ROWS * ROWS)
    return [(a, min(a + size, rows)) for a in range(0, rows, size)]


def token_logprobs(hidden, lm_head, targets, temperature: float = 1.0):
    """(log pi(target), entropy), each [N] float32, for rows of final hidden states; see TokenLogprobs."""
    return TokenLogprobs.apply(hidden, lm_head.weight, lm_head.bias, targets, temperature)


# ---------------------------------------------------------------------------------------------------------------------
# The engine's side


@contextlib.contextmanager
def engine_kernels(mode: str, device: str = "cpu"):
    """On CPUs, while the `vllm.LLM` is built and weights are loaded: put the aligned operations in vLLM's place (`aligned`),
    or leave vLLM as it is (`standard`).

    vLLM binds its operations when a layer is built, so an engine keeps what it was built with after the context ends.
    Replaced: the linear that `dispatch_cpu_unquantized_gemm` chooses (vllm/model_executor/layers/utils.py), the CPU
    methods of RMSNorm and SiluAndMul, the metadata builder and implementation of the CPU attention backend, and what
    kernels_moe.py lists.
    """
    if mode == "standard" or device != "cpu":
        yield
        return
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm as EngineRMSNorm
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    impl, builder = _attention_classes()
    replacements = [
        (layer_utils, "dispatch_cpu_unquantized_gemm", _use_aligned_linear),
        (EngineRMSNorm, "forward_cpu", _engine_rms_norm),
        (SiluAndMul, "forward_cpu", lambda self, x: swiglu(x)),
        (CPUAttentionBackend, "get_impl_cls", staticmethod(lambda: impl)),
        (CPUAttentionBackend, "get_builder_cls", staticmethod(lambda: builder)),
        *kernels_moe.replacements(),
    ]
    saved = [(owner, name, vars(owner).get(name)) for owner, name, _ in replacements]
    try:
        for owner, name, new in replacements:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in saved:
            setattr(owner, name, old) if old is not None else delattr(owner, name)  # absent: it was inherited


def _use_aligned_linear(layer, remove_weight):
    layer.cpu_linear = linear


def _engine_rms_norm(self, x, residual=None):
    weight = self.weight.data
    if residual is not None:
        torch.ops._C.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)
        return x, residual
    x = x.contiguous()  # Qwen3 passes a view into q/k/v, whose strides the operator does not look at
    y = torch.empty_like(x)
    torch.ops._C.rms_norm(y, x, weight, self.variance_epsilon)
    return y


def _attention_classes():
    """Subclasses of vLLM's CPU attention that make every query token a request of its own, under the lock."""
    from vllm.v1.attention.backends import cpu_attn

    class RowBuilder(cpu_attn.CPUAttentionMetadataBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            m = common_attn_metadata
            n, row_lens, table = m.num_actual_tokens, m.seq_lens, m.block_table_tensor
            if m.max_query_len > 1:  # some request has several query tokens: expand requests to rows
                ends = m.query_start_loc[1:]
                owner = torch.repeat_interleave(torch.arange(m.num_reqs), ends - m.query_start_loc[:-1])
                row_lens = (m.seq_lens[owner] - (ends[owner] - 1 - torch.arange(n))).to(torch.int32)
                table = table[owner]
            with ATTENTION_LOCK:
                metadata = _row_metadata(row_lens, self.num_heads, self.num_kv_heads, self.head_dim, self.dtype, self.isa)
            return cpu_attn.CPUAttentionMetadata(
                num_actual_tokens=n,
                max_query_len=1,
                query_start_loc=torch.arange(n + 1, dtype=torch.int32),
                max_seq_len=m.max_seq_len,
                seq_lens=row_lens,
                block_table=table,
                slot_mapping=m.slot_mapping,
                scheduler_metadata=metadata,
            )

    class LockedImpl(cpu_attn.CPUAttentionBackendImpl):
        def forward(self, *args, **kwargs):
            with ATTENTION_LOCK:
                return super().forward(*args, **kwargs)

    return LockedImpl, RowBuilder


if __name__ == "__main__":
    import checks

    raise SystemExit(checks.main())
