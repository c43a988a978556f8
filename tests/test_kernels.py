"""Aligned kernels: bits equal to the engine's, gradients equal to autograd's, and each trick is needed."""

import multiprocessing
import threading
import time

import pytest
import torch
import torch.nn.functional as F

import kernels
from conftest import ARCHITECTURES
from learn import Learner
from rollout import Request, sample_seed

kernels.load_ops()


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


# ---------------------------------------------------------------------------------------------------------------------
# Rollout engine against learner, bit for bit


def make_requests(lengths, seed=0, shared=0):
    """Requests with random prompts; the first `shared` tokens are the same in all."""
    g = torch.Generator().manual_seed(seed)
    prefix = torch.randint(1, 128, (shared,), generator=g).tolist()
    return [Request((prefix + torch.randint(1, 128, (n,), generator=g).tolist())[:n], sample_seed(seed, i)) for i, n in enumerate(lengths)]


# short ones, lengths around one and two blocks of the cache, and one at which the stock attention's prefill has other bits
LENGTHS = [1, 2, 3, 5, 15, 16, 17, 40] * 3 + [87, 88, 90, 127, 128, 129, 150, 200, 240, 255, 256, 257, 300, 700]


@torch.no_grad()
def logprobs_of(learner, samples, temperature=1.0, threads=1):
    learner.temperature = temperature
    torch.set_num_threads(threads)
    return learner.score(samples)[0]


def recorded(samples):
    return torch.cat([s.logprobs for s in samples])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logprobs_recorded_while_decoding_equal_the_learners_bit_for_bit(tiny, engine, arch, dtype):
    path, compared = tiny(arch, dtype), 0
    learner = Learner(path, dtype)  # before the engine: what it leaves in vLLM's caches must not reach the engine
    rollout = engine(path, dtype)
    for temperature, threads in ((1.0, 1), (0.7, 2)):
        torch.set_num_threads(threads)
        samples = rollout.generate(make_requests(LENGTHS, seed=threads), 40, temperature, version=0)
        for learner_threads in (1, 2):
            assert torch.equal(logprobs_of(learner, samples, temperature, learner_threads), recorded(samples))
            compared += len(recorded(samples))
    print(f"{arch} {dtype}: {compared:,} comparisons, all equal")
    assert compared > 3000


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_prefix_cache_hit_equals_miss_bit_for_bit(tiny, engine, dtype, monkeypatch):
    path = tiny("qwen3-untied", dtype)
    rollout, cached = engine(path, dtype), {}
    step = rollout.engine.step

    def counting_step():
        outputs = step()
        cached.update({int(o.request_id): o.num_cached_tokens for o in outputs if o.finished})
        return outputs

    monkeypatch.setattr(rollout.engine, "step", counting_step)
    requests = make_requests([150, 129, 200, 256, 257, 300, 384, 128], shared=150)
    alone = []
    for r in requests:
        rollout.llm.reset_prefix_cache()
        alone += rollout.generate([r], 40, 1.0, version=0)
        assert cached[0] == 0
    rollout.generate(requests, 40, 1.0, version=0)  # fills the cache
    hit = rollout.generate(requests, 40, 1.0, version=0)
    assert sum(cached[i] >= 128 for i in range(len(requests))) == 7  # all but the prompt of one block, whose last token is computed
    assert [s.response_ids for s in hit] == [s.response_ids for s in alone]
    assert torch.equal(recorded(hit), recorded(alone))
    assert torch.equal(logprobs_of(Learner(path, dtype), hit), recorded(hit))


def test_logprobs_stay_equal_after_new_weights_are_loaded(tiny, engine):
    path = tiny("qwen2", "bfloat16")
    learner, rollout = Learner(path, "bfloat16"), engine(path, "bfloat16")
    requests = make_requests([150, 200, 7, 300])
    old = rollout.generate(requests, 20, 1.0, version=0)
    with torch.no_grad():
        for i, p in enumerate(learner.params.values()):
            p.add_(0.05 * randn(*p.shape, seed=i).to(p.dtype))
    rollout.load(learner.weights(), version=7)
    new = rollout.generate(requests, 20, 1.0, version=7)
    assert {s.version for s in new} == {7}
    assert not torch.equal(logprobs_of(learner, old), recorded(old))
    assert torch.equal(logprobs_of(learner, new), recorded(new))


def test_samples_depend_on_their_own_seed_and_not_on_their_batch(tiny, engine):
    rollout = engine(tiny("llama", "bfloat16"), "bfloat16")
    requests = make_requests([5, 130, 17, 40])
    together = rollout.generate(requests, 30, 1.0, version=0)
    backwards = rollout.generate(requests[::-1], 30, 1.0, version=0)[::-1]
    assert [s.response_ids for s in together] == [s.response_ids for s in backwards]
    assert torch.equal(recorded(together), recorded(backwards))
    other = rollout.generate([Request(requests[0].prompt_ids, 1)], 30, 1.0, version=0)
    assert other[0].response_ids != together[0].response_ids


def test_standard_kernels_are_not_equal_bit_for_bit(tiny, engine):
    path = tiny("qwen3", "bfloat16")
    samples = engine(path, "bfloat16", "standard").generate(make_requests([5, 40, 150]), 40, 1.0, version=0)
    difference = (logprobs_of(Learner(path, "bfloat16", "standard"), samples) - recorded(samples)).abs().max()
    assert 0 < difference < 0.5


# ---------------------------------------------------------------------------------------------------------------------
# Faults of the engine's side are errors


def test_weight_load_without_a_prefix_cache_reset_is_an_error(tiny, engine, monkeypatch):
    path = tiny("qwen3", "bfloat16")
    rollout = engine(path, "bfloat16")
    weights = Learner(path, "bfloat16").weights()
    monkeypatch.setattr(rollout.llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="prefix cache"):
        rollout.load(weights, 1)
    assert rollout.version != 1


def test_generating_with_a_version_that_the_engine_does_not_hold_is_an_error(tiny, engine):
    rollout = engine(tiny("qwen3", "bfloat16"), "bfloat16")
    with pytest.raises(RuntimeError, match="holds weights version 0, batch needs 3"):
        rollout.generate(make_requests([4]), 5, 1.0, version=3)


def test_sample_labelled_with_another_version_is_an_error(tiny, engine):
    rollout = engine(tiny("qwen3", "bfloat16"), "bfloat16")
    rollout.engine.set_weight_version("5")  # as if something else had loaded weights
    with pytest.raises(RuntimeError, match="expected 0 alone"):
        rollout.generate(make_requests([4]), 5, 1.0, version=0)


def test_architecture_without_aligned_kernels_is_a_one_line_error_that_names_the_setting(tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gpt2.*--kernels standard") as error:
        Learner(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"use_sliding_window": True, "sliding_window": 64}])
def test_setting_without_aligned_kernels_is_a_one_line_error(change):
    from transformers import Qwen2Config

    with pytest.raises(ValueError, match="--kernels standard") as error:
        kernels.require_supported(Qwen2Config(**change))
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_equal_those_of_the_stock_model(tiny, arch):
    from transformers import AutoModelForCausalLM

    path, g = tiny(arch, "float32"), torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 128, (n,), generator=g).tolist() for n in (1, 2, 3, 17, 64, 128, 129, 200)]
    tokens = sum(map(len, sequences))
    targets, coefficient = torch.randint(0, 128, (tokens,), generator=g), torch.randn(tokens, generator=g) / tokens

    model = Learner(path, "float32").model
    packed = kernels.pack(sequences)
    hidden = kernels.hidden_states(model, packed, kernels.rotary_table(model.config, model.dtype))[:tokens]
    logp, _ = kernels.token_logprobs(hidden, model.lm_head, targets)
    logp.backward(coefficient)

    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    logits = torch.cat([stock(torch.tensor([s]), use_cache=False).logits[0] for s in sequences])
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    expected.backward(coefficient)
    assert relative(logp, expected) < 1e-5
    for (name, p), q in zip(model.named_parameters(), stock.parameters()):
        assert relative(p.grad, q.grad) < 1e-5, name


def check_gradients(op, reference, *inputs, tolerance=1e-5):
    """Outputs and input gradients of op in float32 against autograd through reference in float64."""
    a = [x.clone().requires_grad_() for x in inputs]
    b = [x.double().requires_grad_() for x in inputs]
    got, expected = op(*a), reference(*b)
    got, expected = ((x,) if isinstance(x, torch.Tensor) else x for x in (got, expected))
    for x, y in zip(got, expected):
        assert relative(x, y) < tolerance
    kept = [x.detach().clone() for x in (*a, *got)]
    grads = [randn(*y.shape, seed=100 + i) for i, y in enumerate(got)]
    torch.autograd.backward(got, grads)
    torch.autograd.backward(expected, [g.double() for g in grads])
    for x, y in zip(a, b):
        assert relative(x.grad, y.grad) < tolerance
    assert all(torch.equal(x, y) for x, y in zip((*a, *got), kept)), "the backward wrote to a tensor that it does not own"


def norm64(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def test_rms_norm_backward_equals_autograd():
    check_gradients(lambda x, w: kernels.RMSNorm.apply(x, w, 1e-6), norm64, randn(37, 64), 1 + randn(64, seed=1))


def test_rms_norm_of_a_strided_view_equals_that_of_its_copy():
    # q and k are views into one matrix; with one key head the view keeps its row stride, which the C++ operator ignores
    qkv, weight = randn(6, 256), 1 + randn(64, seed=1)
    view = qkv[:, 128:192]
    assert torch.equal(kernels.RMSNorm.apply(view, weight, 1e-6), kernels.RMSNorm.apply(view.contiguous(), weight, 1e-6))


def test_add_rms_norm_backward_equals_autograd():
    def reference(x, residual, weight):
        return norm64(x + residual, weight), x + residual

    op = lambda x, r, w: kernels.RMSNorm.apply(x, w, 1e-6, r)  # noqa: E731
    check_gradients(op, reference, randn(37, 64), randn(37, 64, seed=1), 1 + randn(64, seed=2))


def test_rotary_backward_equals_autograd():
    angle = torch.outer(torch.arange(64.0), 10000 ** -(torch.arange(0, 32, 2) / 32))
    cos_sin, positions, D = torch.cat([angle.cos(), angle.sin()], -1), torch.randint(0, 64, (37,)), 32

    def rotate(x):
        cos, sin = cos_sin[positions].double()[:, None].chunk(2, -1)
        a, b = x.view(37, -1, D).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).view(x.shape)

    check_gradients(
        lambda q, k: kernels.Rotary.apply(q, k, positions, cos_sin, D), lambda q, k: (rotate(q), rotate(k)),
        randn(37, 4 * D), randn(37, 2 * D, seed=1),
    )  # fmt: skip


def attention_inputs(lengths, H, K, D, dtype=torch.float32):
    packed = kernels.pack([[0] * n for n in lengths])
    q, k, v = (randn(len(packed.input_ids), heads * D, seed=i, dtype=dtype) for i, heads in enumerate((H, K, K)))
    return q, k, v, packed, kernels._plan(packed.row_lens, H, K, D, dtype)


@pytest.mark.parametrize("H, K, D", [(4, 2, 32), (3, 1, 64), (2, 2, 128)])
def test_attention_backward_equals_autograd(H, K, D):
    # like lengths share a padded group of the backward; 129 and 260 reach into another block
    lengths = [1, 2, 5, 60, 64, 70, 127, 128, 129, 260]
    q, k, v, packed, plan = attention_inputs(lengths, H, K, D)
    n = packed.tokens

    def reference(q, k, v):
        outs = []
        for q1, k1, v1 in zip(*(x[:n].view(n, -1, D).split(lengths) for x in (q, k, v))):
            out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q1, k1, v1)), is_causal=True, enable_gqa=True)
            outs.append(out[0].transpose(0, 1).reshape(len(q1), -1))
        return torch.cat(outs)

    check_gradients(lambda q, k, v: kernels.Attention.apply(q, k, v, packed, D, plan)[:n], reference, q, k, v)


def test_attention_padding_rows_have_no_output_and_no_gradient():
    q, k, v, packed, plan = attention_inputs([5, 130], 4, 2, 32)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = kernels.Attention.apply(*inputs, packed, 32, plan)
    out.backward(randn(*out.shape))
    assert len(out) == 144 and packed.tokens == 135
    for x in (out, *(x.grad for x in inputs)):
        assert torch.equal(x[135:], torch.zeros_like(x[135:])) and x.isfinite().all()


def test_pack_puts_every_token_into_one_backward_group():
    lengths = [1, 300, 2, 128, 64, 65, 66, 5, 5, 1, 257]
    packed = kernels.pack([[7] * n for n in lengths])
    index = torch.cat([g.flatten() for g in packed.groups])
    assert sorted(index[index >= 0].tolist()) == list(range(sum(lengths))) and len(packed.input_ids) % 16 == 0
    assert packed.positions[: packed.tokens].tolist() == [i for n in lengths for i in range(n)]


def test_swiglu_backward_equals_autograd():
    check_gradients(kernels.SwiGLU.apply, lambda x: F.silu(x[:, :160]) * x[:, 160:], randn(37, 320))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("biased", [False, True])
def test_token_logprobs_backward_equals_autograd(temperature, biased, monkeypatch):
    monkeypatch.setattr(kernels, "_chunks", lambda vocab, rows, cuda: [(0, 32), (32, 64), (64, 75)])
    targets = torch.randint(0, 50, (75,), generator=torch.Generator().manual_seed(0))
    op = lambda h, w, b=None: kernels.TokenLogprobs.apply(h, w, b, targets, temperature)[0]  # noqa: E731

    def reference(h, w, b=0.0):
        return torch.log_softmax((h @ w.t() + b) / temperature, -1).gather(1, targets[:, None])[:, 0]

    check_gradients(op, reference, randn(75, 24), randn(50, 24, seed=1), *([randn(50, seed=2)] if biased else []))


def test_entropy_is_that_of_the_distribution_and_zero_for_a_certain_token():
    weight = torch.eye(4)
    hidden = torch.tensor([[0.0, 0, 0, 0], [1e4, 0, 0, 0]])
    _, entropy = kernels.TokenLogprobs.apply(hidden, weight, None, torch.tensor([0, 0]), 1.0)
    assert entropy.tolist() == pytest.approx([torch.tensor(4.0).log().item(), 0.0])


# ---------------------------------------------------------------------------------------------------------------------
# Rows do not depend on the batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_linear_rows_do_not_depend_on_the_row_count_or_on_threads(dtype, threads):
    torch.set_num_threads(threads)
    x, w, b = randn(256, 384, dtype=dtype), randn(128, 384, seed=1, dtype=dtype), randn(128, seed=2, dtype=dtype)
    full = kernels.linear(x, w, b)
    for n in (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 127, 129, 255):
        assert torch.equal(kernels.linear(x[:n], w, b), full[:n]), n
    assert torch.equal(torch.cat([kernels.linear(x, w[:32]), kernels.linear(x, w[32:])], -1), kernels.linear(x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cores", [2, 64])  # on machines of more than two cores another operator is chosen
@pytest.mark.parametrize("width", [128, 160, 384])
def test_swiglu_rows_do_not_depend_on_the_row_count_or_on_threads(dtype, cores, width, monkeypatch):
    monkeypatch.setattr(kernels, "CORES", cores)
    x, full = 4 * randn(2001, 2 * width, dtype=dtype), None
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = kernels.swiglu(x)
        assert full is None or torch.equal(out, full)
        full = out
        for n in (1, 2, 3, 7, 16, 17, 129, 255):
            assert torch.equal(kernels.swiglu(x[:n]), full[:n]), n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_rows_do_not_depend_on_the_batch(dtype):
    lengths = [1, 127, 128, 129, 16, 17, 260]
    q, k, v, packed, plan = attention_inputs(lengths, 4, 2, 32, dtype)
    together = kernels.Attention.apply(q, k, v, packed, 32, plan)
    start = 0
    for n in lengths:
        one = kernels.pack([[0] * n])
        part = [F.pad(x[start : start + n], (0, 0, 0, -n % 16)) for x in (q, k, v)]
        for threads in (1, 2):
            torch.set_num_threads(threads)
            plan = kernels._plan(one.row_lens, 4, 2, 32, dtype)  # is for a number of threads
            assert torch.equal(kernels.Attention.apply(*part, one, 32, plan)[:n], together[start : start + n])
        start += n


# ---------------------------------------------------------------------------------------------------------------------
# Every trick is needed: without it, what holds above does not


def test_without_the_row_operator_swiglu_at_odd_widths_follows_the_number_of_threads():
    different = 0
    for width in range(90, 128, 3):
        x, outs = 4 * randn(4001, 2 * width, seed=width), []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outs.append(F.silu(x[:, :width]) * x[:, width:])
        different += (outs[0] != outs[1]).sum().item()
    print(f"{different} elements differ")
    assert different > 0


def stock_linear(layer, remove_weight):
    layer.cpu_linear = F.linear


def stock_attention():
    from vllm.v1.attention.backends import cpu_attn

    return cpu_attn.CPUAttentionBackendImpl, cpu_attn.CPUAttentionMetadataBuilder


def fused_swiglu(x):  # rounded once, not twice
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    gate, up = x.float().chunk(2, -1)
    return out.copy_(F.silu(gate) * up)


@pytest.mark.parametrize(
    "name, stock, arch, dtype",
    [
        ("_use_aligned_linear", stock_linear, "qwen2", "float32"),
        ("_attention_classes", stock_attention, "qwen3-untied", "float32"),
        ("swiglu", fused_swiglu, "qwen2", "bfloat16"),
    ],
)
def test_engine_without_one_of_the_aligned_operations_gives_other_logprobs(tiny, engine, monkeypatch, name, stock, arch, dtype):
    path = tiny(arch, dtype)
    monkeypatch.setattr(kernels, name, stock)
    samples = engine(path, dtype, variant=name).generate(make_requests([700, 9]), 40, 1.0, version=0)
    monkeypatch.undo()
    assert not torch.equal(logprobs_of(Learner(path, dtype), samples), recorded(samples))
    samples = engine(path, dtype).generate(make_requests([700, 9]), 40, 1.0, version=0)
    assert torch.equal(logprobs_of(Learner(path, dtype), samples), recorded(samples))


def test_without_padding_a_linear_layer_gives_other_bits_at_few_rows():
    different = 0
    for seed, (inputs, outputs) in enumerate([(128, 256), (384, 128), (128, 64), (896, 896)]):
        x, w = randn(64, inputs, seed=seed), randn(outputs, inputs, seed=seed + 9)
        full = F.linear(x, w)
        assert torch.equal(full, kernels.linear(x, w))
        different += sum(not torch.equal(F.linear(x[:n], w), full[:n]) for n in (1, 2, 3, 5))
    assert different > 0


def test_without_a_request_for_each_row_attention_gives_other_bits():
    different = 0
    for dtype in (torch.float32, torch.bfloat16):
        L, H, K, D = 700, 4, 2, 128
        q, k, v, packed, plan = attention_inputs([L], H, K, D, dtype)
        rows = kernels.Attention.apply(q, k, v, packed, D, plan)[:L]
        q, k, v = (x[:L].view(L, -1, D) for x in (q, k, v))
        cache = q.new_zeros(packed.blocks, K, 2 * kernels.BLOCK, D)
        keys, values = cache.chunk(2, dim=2)
        starts, lens = torch.tensor([0, L], dtype=torch.int32), torch.tensor([L], dtype=torch.int32)
        isa = plan[1]
        stock = torch.ops._C.get_scheduler_metadata(1, H, K, D, lens, dtype, starts, True, -1, isa, False, None)
        torch.ops._C.cpu_attn_reshape_and_cache(k, v, keys, values, packed.slots, isa)
        out = torch.zeros_like(q)
        torch.ops._C.cpu_attention_with_kv_cache(
            q, keys, values, out, starts, lens, D**-0.5, True, None, -1, packed.block_table[:1], 0.0, stock, None, None
        )
        torch.testing.assert_close(out.view(L, -1), rows, rtol=0.02, atol=0.02)
        different += (out.view(L, -1) != rows).any(-1).sum().item()
    assert different > 0


def test_rounding_the_residual_sum_before_the_norm_gives_other_logprobs(tiny, engine, monkeypatch):
    path = tiny("qwen3", "bfloat16")
    learner, samples = Learner(path, "bfloat16"), engine(path, "bfloat16").generate(make_requests([9, 140]), 40, 1.0, version=0)
    assert torch.equal(logprobs_of(learner, samples), recorded(samples))

    norm = kernels.RMSNorm.apply

    class RoundedFirst:  # as transformers does
        @staticmethod
        def apply(x, weight, eps, residual=None):
            return norm(x, weight, eps) if residual is None else (norm(x + residual, weight, eps), x + residual)

    monkeypatch.setattr(kernels, "RMSNorm", RoundedFirst)
    assert not torch.equal(logprobs_of(learner, samples), recorded(samples))


def test_add_rms_norm_scales_the_rounded_sum_by_the_mean_square_of_the_unrounded_one():
    # what the C++ operator does on a CPU; vLLM rounds the sum for the residual and normalises that, in float32
    x, residual, weight = (randn(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate([(64, 128), (64, 128), (128,)]))
    y, total = kernels.RMSNorm.apply(x, weight, 1e-6, residual)
    assert torch.equal(total, x + residual)
    unrounded = x.double() + residual.double()
    scale = torch.rsqrt(unrounded.square().mean(-1, keepdim=True) + 1e-6)
    assert (y == (total.double() * scale * weight.double()).bfloat16()).float().mean() > 0.99
    assert (y == kernels.RMSNorm.apply(total, weight, 1e-6)).float().mean() < 0.98  # rounding first: as transformers does


def test_a_scratch_cache_that_is_not_zeros_may_give_nan(monkeypatch):
    inputs = attention_inputs([5, 130], 4, 2, 32)
    q, k, v, packed, plan = inputs
    assert kernels.Attention.apply(q, k, v, packed, 32, plan).isfinite().all()
    monkeypatch.setattr(torch.Tensor, "new_zeros", lambda x, *shape: x.new_full(shape, float("nan")))
    assert kernels.Attention.apply(q, k, v, packed, 32, plan).isnan().any()


def test_making_the_rotary_table_leaves_the_engines_cache_as_it_was(tiny):
    from transformers import AutoConfig
    from vllm.model_executor.layers import rotary_embedding

    cache = rotary_embedding._ROPE_DICT
    before = dict(cache)
    table = kernels.rotary_table(AutoConfig.from_pretrained(tiny("qwen3", "bfloat16")), torch.bfloat16)
    assert table.shape == (1024, 32) and table.dtype == torch.bfloat16
    assert rotary_embedding._ROPE_DICT is cache and cache == before


def test_engine_kernels_leaves_vllm_as_it_was():
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    owners = (layer_utils, SiluAndMul, RMSNorm, CPUAttentionBackend)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(KeyError), kernels.engine_kernels("aligned"):
        assert layer_utils.dispatch_cpu_unquantized_gemm is kernels._use_aligned_linear
        raise KeyError
    assert [dict(vars(owner)) for owner in owners] == before


def _wrong_results(locked: bool, seconds: float, found):
    """In a process of its own, which the race may crash: two threads in the attention at once; counts wrong results."""
    torch.set_num_threads(1)
    cases = [attention_inputs([300 + 8 * i] * 4, 4, 2, 128) for i in range(2)]
    expected = [kernels.Attention.apply(*c[:4], 128, c[4]) for c in cases]
    stop = time.monotonic() + seconds
    if not locked:
        kernels.ATTENTION_LOCK = __import__("contextlib").nullcontext()

    def work(case, right):
        while time.monotonic() < stop and found[1] == 0:
            out = kernels.Attention.apply(*case[:4], 128, case[4])
            found[0] += 1
            found[1] += not torch.equal(out, right)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, expected)]
    [t.start() for t in threads]
    [t.join() for t in threads]


def run_race(locked, seconds):
    """(results, wrong ones); a crash counts as a wrong one."""
    context = multiprocessing.get_context("fork")
    found = context.Array("l", 2, lock=False)
    process = context.Process(target=_wrong_results, args=(locked, seconds, found))
    process.start()
    process.join()
    return found[0], found[1] + (process.exitcode != 0)


def test_two_threads_in_attention_are_right_under_the_lock():
    results, wrong = run_race(locked=True, seconds=2)
    assert results > 10 and wrong == 0


def test_two_threads_in_attention_are_wrong_without_the_lock():
    for _ in range(3):
        if run_race(locked=False, seconds=10)[1]:
            return
    pytest.fail("no wrong result in 30 s: is ATTENTION_LOCK still needed?")
