"""The CUDA side of kernels.py: the functions that vLLM's own engine calls on a GPU in its batch-invariant mode.

No GPU has run this file yet: it is written from the source of vLLM 0.32.0, and claims nothing before its checks pass on one.

On CPUs the engine is given our operations. Here VLLM_BATCH_INVARIANT=1 makes the engine's own independent of the batch, and
the learner calls the same functions, with the backward passes of kernels.py. What the engine calls (paths inside vllm/):

    linear, lm_head   model_executor/layers/{linear,vocab_parallel_embedding}.py, `apply`: linear_batch_invariant of
                      model_executor/determinism/batch_invariant.py (Triton; the bias joins the float32 accumulator)
    RMSNorm           model_executor/layers/layernorm.py: rms_norm_batch_invariant of the same file (Triton); with a residual
                      the C++ operator fused_add_rms_norm, which has the same name on CPUs
    rotary, SwiGLU    model_executor/layers/{rotary_embedding/base,activation}.py, `forward_cuda`: C++ operators, as on CPUs
    attention         v1/attention/backends/triton_attn.py (Triton, one kernel for decode and prefill in this mode). Not
                      FLASH_ATTN: on Hopper its tiles, and so its bits, follow the longest query of the batch, in this mode
                      too (https://github.com/vllm-project/vllm/issues/51902)
    log-probability   model runner V2, v1/worker/gpu/sample/{sampler,states,gumbel,logprob}.py
"""

import contextlib
import functools
import importlib.metadata
import os
import re
import sys
from types import SimpleNamespace

import torch

BLOCK = 16  # tokens per KV-cache block, on both sides (vLLM's default on GPUs)
BACKEND = "TRITON_ATTN"
ENVIRONMENT = {
    "aligned": {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"},  # V1's log-softmax is another function
    "standard": {"VLLM_BATCH_INVARIANT": "0"},
}


def choose_devices(engine: str | None = None, learner: str | None = None) -> tuple[str, str]:
    """Devices of engine and learner, "cpu" or "cuda:N". What is not given: both on the one GPU; of several, the engine on
    the last and the learner on the first; without any, the CPU. Raises ValueError (one line) for a device that is not there."""
    gpus = torch.cuda.device_count() if _vllm_version() else 0
    default = ("cpu", "cpu") if not gpus or "cpu" in (engine, learner) else (f"cuda:{gpus - 1}", "cuda:0")
    chosen = [engine or default[0], learner or default[1]]
    for i, flag in enumerate(("--engine-device", "--learner-device")):
        if not (found := re.fullmatch(r"cpu|cuda(?::(\d+))?", chosen[i])):
            raise ValueError(f"{flag} {chosen[i]}: must be cpu, cuda or cuda:N")
        if chosen[i] != "cpu" and int(found[1] or 0) >= gpus:
            raise ValueError(f"{flag} {chosen[i]}: there is no such GPU here, only {gpus}")
        chosen[i] = "cuda:0" if chosen[i] == "cuda" else chosen[i]
    if "cpu" in chosen and chosen != ["cpu", "cpu"]:
        raise ValueError(f"--engine-device {chosen[0]}, --learner-device {chosen[1]}: both must be GPUs or both the CPU")
    return tuple(chosen)


def _vllm_version() -> str:
    """Of vLLM's CUDA build; "" if that is not installed (the CPU's goes by another name)."""
    return next((d.version for d in importlib.metadata.distributions(name="vllm")), "")


def require_cuda(*devices: str, **llm) -> None:
    """Raise ValueError, one line, for what is known not to give equal bits on these GPUs; llm: arguments of `vllm.LLM`."""
    backend = llm.get("attention_backend") or os.environ.get("VLLM_ATTENTION_BACKEND") or BACKEND
    names = [torch.cuda.get_device_name(d) for d in devices]
    major, minor = min(torch.cuda.get_device_capability(d) for d in devices)
    if not _vllm_version().startswith("0.32."):
        fault = f"vLLM {_vllm_version()} is installed, not 0.32"
    elif major < 8:
        fault = f"compute capability {major}.{minor} is below 8.0"
    elif len(set(names)) > 1:
        fault = f"the GPUs differ ({', '.join(names)}), and kernels are chosen by GPU: give --engine-device and --learner-device"
    elif backend != BACKEND:
        fault = f"attention backend {backend} has no aligned version, {BACKEND} has"
    elif llm.get("tensor_parallel_size", 1) > 1:
        fault = f"tensor parallelism over {llm['tensor_parallel_size']} GPUs sums in parts, and the learner does not"
    else:
        return
    raise ValueError(f"--kernels aligned: {fault}; or choose --kernels standard")


def prepare(kernels_mode: str, device: str, **llm) -> None:
    """Set vLLM's environment, before vLLM is imported: some files read it then (v1/attention/ops/triton_unified_attention.py).
    Raises ValueError if it has been imported with another, or for what `require_cuda` refuses."""
    if kernels_mode == "aligned":
        require_cuda(device, **llm)
    if "vllm" in sys.modules and any(os.environ.get(k, "0") != v for k, v in ENVIRONMENT[kernels_mode].items()):
        raise ValueError(f"--kernels {kernels_mode}: vLLM was imported here with other settings; on CUDA it takes a process each")
    os.environ.update(ENVIRONMENT[kernels_mode])


def engine_settings(kernels_mode: str, device: str, memory: float | None) -> dict:
    """Arguments of `vllm.LLM` on a GPU. memory: share of the GPU's memory; None: 0.4, which leaves room for the learner."""
    # ids count within CUDA_VISIBLE_DEVICES; asynchronous scheduling might have a step under way when weights are loaded
    settings = {"device_ids": [torch.device(device).index], "gpu_memory_utilization": memory or 0.4, "async_scheduling": False}
    if kernels_mode == "aligned":  # eager: a compiled engine fuses operations that the learner calls one by one
        settings |= {"enforce_eager": True, "block_size": BLOCK, "attention_backend": BACKEND}
    return settings


# ---------------------------------------------------------------------------------------------------------------------
# Streams: learner and engine have one each


def own_stream(device) -> torch.cuda.Stream | None:
    """A new stream; None, which `torch.cuda.stream` takes for "no change", on the CPU."""
    return torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None


def written(weights: dict[str, torch.Tensor]) -> torch.cuda.Event | None:
    """An event behind all that this thread has queued for the weights' GPU; None on the CPU."""
    w = next(iter(weights.values()))
    return torch.cuda.current_stream(w.device).record_event() if w.is_cuda else None


@contextlib.contextmanager
def reading(weights: dict[str, torch.Tensor], stream: torch.cuda.Stream | None):
    """Run the block on `stream`, after the weights have been written; when it ends they have been read, so that whoever
    drops them then frees no memory that is still being copied."""
    event = getattr(weights, "written", None) or written(weights)
    with torch.cuda.stream(stream):
        if event is not None:  # a copy between two GPUs runs on this thread's stream of the source
            torch.cuda.current_stream(next(iter(weights.values())).device).wait_event(event)
            stream.wait_event(event)
        yield
        if stream is not None:
            stream.synchronize()


# ---------------------------------------------------------------------------------------------------------------------
# Forward passes


def _late(module, name):
    """A function of vLLM's, imported when it is called: the environment must be set before vLLM is imported."""
    return lambda *args: getattr(importlib.import_module(f"vllm.{module}"), name)(*args)


linear = _late("model_executor.determinism.batch_invariant", "linear_batch_invariant")  # (x, weight, bias)
rms_norm = _late("model_executor.determinism.batch_invariant", "rms_norm_batch_invariant")  # (x, weight, eps)


class Linear(torch.autograd.Function):
    """x [rows, in] @ weight [out, in].T + bias; the Triton kernel has no backward of its own. Its tiles are chosen by the
    matrix' shape (batch_invariant_configs.py), so q/k/v and gate/up must be one matrix, as in the engine."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x, dy.sum(0) if ctx.needs_input_grad[2] else None


def apply_temperature(logits, temperature):
    """Divide logits [rows, V] float32 in place."""
    request = torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)  # row -> which temperature
    temperatures = torch.tensor([temperature], dtype=torch.float32, device=logits.device)
    _late("v1.worker.gpu.sample.gumbel", "apply_temperature")(logits, request, temperatures)


def token_logprobs(raw, tempered, ids, temperature):
    """Log-probabilities [N, n] float32 of ids [N, n]. As in the engine, those at temperature 1 come from the logits in the model's
    dtype, raw [N, V], not from float32: the values are the same, but the kernel may add wider loads in another order."""
    return _late("v1.worker.gpu.sample.logprob", "compute_token_logprobs")(raw if temperature == 1.0 else tempered, ids)


@functools.cache
def _attention_layer(H, K, D, device):
    """The engine's attention for these sizes, its metadata without what the batch decides, and its scales."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata

    buffers = ("seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
    unsplit = dict.fromkeys(buffers)  # those of the kernel that splits a sequence, which this mode does not use
    one = torch.ones((), device=device)  # the cache is not quantized
    scales = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    impl = TritonAttentionImpl(H, D, D**-0.5, K, None, None, "auto")
    return impl, functools.partial(TritonAttentionMetadata, causal=True, **unsplit), scales


def attention(q, k, v, packed) -> torch.Tensor:
    """q [T, H, D], k and v [T, K, D] -> [T, H, D]: every packed sequence is a prefill of its own over a scratch cache."""
    n, K, D = packed.tokens, k.shape[1], k.shape[2]
    impl, metadata, scales = _attention_layer(q.shape[1], K, D, q.device)
    # vLLM's logical layout [blocks, K, BLOCK, 2 * D], keys before values; zeros for the reason in kernels.Attention
    cache = q.new_zeros(packed.blocks, BLOCK, K, 2 * D).transpose(1, 2)
    longest, out = max(packed.lengths), torch.zeros_like(q)
    batch = metadata(num_actual_tokens=n, max_query_len=longest, query_start_loc=packed.starts, max_seq_len=longest,
                     seq_lens=packed.row_lens, block_table=packed.block_table, slot_mapping=packed.slots)  # fmt: skip
    impl.do_kv_cache_update(scales, k[:n], v[:n], cache, packed.slots)
    impl.forward(scales, q[:n], k[:n], v[:n], cache, batch, out[:n])
    return out
